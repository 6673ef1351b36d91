"""Requests to the engines. Which engine serves a request, and its seed, are computed from indices alone."""

from __future__ import annotations

import hashlib
import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from rlhpc.api import Completion, Prompt, Request, Sample

SeedRoot = tuple[int, int, int, int]  # the run's seed, the step, the prompt, the sample's number


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters of responses."""

    max_tokens: int  # per response, over all turns
    temperature: float  # 0: greedy
    top_p: float


@dataclass(frozen=True)
class Task:
    """A response to sample or resume; ``draft`` is its present state, at first the prompt alone. Group and index are
    unique among the responses in flight."""

    group: int
    index: int  # in the group
    prompt: Prompt
    draft: Sample
    root: SeedRoot
    tool_calls: int = 0  # since it was begun or resumed
    failed_tool_calls: int = 0  # those answered with an error
    sampling: Sampling | None = None  # None: that of the collector


def share_of(items: int, parts: int, index: int) -> range:
    """A contiguous share of the items; shares differ by at most one. It keeps a prompt's samples on one engine, which
    caches their common prefix once."""
    return range(items * index // parts, items * (index + 1) // parts)


def mixed_bits(*words: int) -> int:
    """63 pseudo-random bits, determined by the arguments."""
    digest = hashlib.blake2b(struct.pack(f"<{len(words)}Q", *words), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def request_seed(root: SeedRoot) -> int:
    """Seed of all requests of a response, including those that resume it; independent of ranks, engines and batches.

    A resumed response continues its random numbers, because the engine derives a token's from this seed and the token's
    position (``rlhpc.rollout.token_seeds``).
    """
    return mixed_bits(*root)


def first_samples(prompt_ids: Sequence[int], count: int, before: Counter[int] | None = None) -> list[int]:
    """For each prompt of a step, the number of its earlier samples, so that a repeated prompt gets new samples.
    ``before``: earlier occurrences of prompts; updated in place.
    """
    seen = Counter() if before is None else before
    firsts = []
    for prompt_id in prompt_ids:
        firsts.append(seen[prompt_id] * count)
        seen[prompt_id] += 1
    return firsts


def blank_draft(prompt: Prompt, policy_version: int, group_id: int = 0) -> Sample:
    """A draft that holds the prompt alone, for weights of the given version."""
    return Sample(
        prompt_id=prompt.prompt_id,
        group_id=group_id,
        tokens=np.asarray(prompt.tokens, dtype=np.int32),
        prompt_len=len(prompt.tokens),
        log_probs=np.zeros(0, dtype=np.float32),
        reward=0.0,
        policy_version=policy_version,
        truncated=False,
    )


def request_of(task: Task, sampling: Sampling) -> Request:
    """Request for the rest of a task's response; ``sampling``: of tasks without their own."""
    sampling = task.sampling or sampling
    return Request(
        prompt=tuple(task.draft.tokens.tolist()),
        seed=request_seed(task.root),
        max_tokens=sampling.max_tokens - task.draft.response_len,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
    )


def with_sampled(draft: Sample, completion: Completion, policy_version: int) -> Sample:
    """The draft, extended by the tokens that the policy sampled."""
    routed_experts = completion.routed_experts
    if routed_experts is not None and draft.routed_experts is not None:  # earlier tokens keep theirs
        routed_experts = np.concatenate([draft.routed_experts, routed_experts[len(draft.routed_experts) :]])
    return replace(
        draft,
        tokens=np.concatenate([draft.tokens, completion.tokens]),
        log_probs=np.concatenate([draft.log_probs, completion.log_probs]),
        response_mask=None
        if draft.response_mask is None
        else np.append(draft.response_mask, np.ones(len(completion.tokens), bool)),
        policy_version=draft.policy_version if draft.response_len else policy_version,
        token_versions=_versions(draft, len(completion.tokens), policy_version),
        truncated=completion.truncated,
        routed_experts=draft.routed_experts if routed_experts is None else routed_experts,
    )


def with_tool_tokens(draft: Sample, tokens: Sequence[int]) -> Sample:
    """The draft, extended by tokens of tools' answers."""
    response_mask = np.ones(draft.response_len, bool) if draft.response_mask is None else draft.response_mask
    return replace(
        draft,
        tokens=np.append(draft.tokens, np.asarray(tokens, dtype=np.int32)),
        log_probs=np.append(draft.log_probs, np.zeros(len(tokens), dtype=np.float32)),
        response_mask=np.append(response_mask, np.zeros(len(tokens), bool)),
        tool_tokens=draft.tool_tokens + len(tokens),
        token_versions=_versions(draft, len(tokens), last_version(draft)),
    )


def last_version(draft: Sample) -> int:
    """Policy version of a draft's last sampled token."""
    return draft.policy_version if draft.token_versions is None else int(draft.token_versions[-1])


def _versions(draft: Sample, count: int, policy_version: int) -> np.ndarray | None:
    """``Sample.token_versions`` of a draft extended by ``count`` tokens of a version."""
    before = draft.token_versions
    if before is None:
        if not draft.response_len or not count or draft.policy_version == policy_version:
            return None
        before = np.full(draft.response_len, draft.policy_version, dtype=np.int32)
    return np.append(before, np.full(count, policy_version, dtype=np.int32))


def turns(sample: Sample) -> int:
    """Number of the policy's turns: one more than replies of tools."""
    if sample.response_mask is None:
        return 1
    masked = np.concatenate([[False], ~sample.response_mask])
    return 1 + int((masked[1:] & ~masked[:-1]).sum())


def last_turn(sample: Sample) -> np.ndarray:
    """Tokens that the policy sampled since the last reply of tools."""
    response = sample.tokens[sample.prompt_len :]
    if sample.response_mask is None:
        return response
    masked = np.flatnonzero(~sample.response_mask)
    return response[masked[-1] + 1 :] if len(masked) else response
