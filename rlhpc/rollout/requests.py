"""Requests to the engines. Which engine serves a request, and its seed, are computed from indices alone."""

from __future__ import annotations

import hashlib
import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rlhpc.api import Completion, KeptTokens, Prompt, Request, Sample, SamplingOptions
from rlhpc.config.rollout import ResolvedSampling, RolloutSection, SamplingOverrides

SeedRoot = tuple[int, int, int, int]  # the run's seed, the step, the prompt, the sample's number


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters of responses."""

    max_tokens: int  # per response, over all turns
    temperature: float  # 0: greedy
    top_p: float
    options: SamplingOptions = field(default_factory=SamplingOptions)
    by_source: Mapping[str, Sampling] = field(default_factory=dict)  # of prompts of some data sources

    def of(self, task: Task) -> Sampling:
        """That of a task, unless it has its own."""
        own = task.sampling or self
        return own.by_source.get(task.prompt.data_source, own)


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


def sampling_of(section: RolloutSection, temperature: float, overrides: SamplingOverrides | None = None) -> Sampling:
    """Sampling at a temperature; 0 is greedy. ``overrides``: keys of a use of its own, such as validation."""

    def of_source(source: str | None) -> Sampling:
        found = section.sampling_of(source, overrides)
        drawn = temperature > 0
        top_p = found.top_p if drawn else 1.0
        return Sampling(section.max_response_tokens, temperature, top_p, _options(found, drawn=drawn))

    return replace(of_source(None), by_source={source: of_source(source) for source in section.sampling_by_source})


def _options(section: ResolvedSampling, *, drawn: bool) -> SamplingOptions:
    form = section.structured_output
    given = () if form is None else form.given.items()
    return SamplingOptions(
        top_k=section.top_k if drawn else None,
        min_p=section.min_p if drawn else 0.0,
        repetition_penalty=section.repetition_penalty,
        presence_penalty=section.presence_penalty,
        frequency_penalty=section.frequency_penalty,
        logit_bias=tuple(section.logit_bias.items()),
        min_tokens=section.min_tokens,
        stop=tuple(section.stop),
        train_on_stop=section.train_on_stop,
        stop_token_ids=tuple(section.stop_token_ids),
        bad_words=tuple(section.bad_words),
        structured_output=next(iter(given), None),
    )


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
    sampling = sampling.of(task)
    length, options = task.draft.response_len, sampling.options
    return Request(
        prompt=tuple(task.draft.tokens.tolist()),
        seed=request_seed(task.root),
        max_tokens=sampling.max_tokens - length,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        options=replace(options, min_tokens=max(0, options.min_tokens - length)),
        later_turn=turns(task.draft) > 1,
    )


def from_turn(draft: Sample) -> Sample:
    """The draft without what the policy has sampled since the last reply of tools, or since the prompt."""
    length = draft.response_len - len(last_turn(draft))
    end = draft.prompt_len + length
    cut: dict[str, Any] = {
        name: None if (values := getattr(draft, name)) is None else values[:length]
        for name in ("log_probs", "response_mask", "token_versions")
    }
    kept = None if draft.kept is None else draft.kept[:length]
    routed_experts = None if draft.routed_experts is None else draft.routed_experts[: end - 1]
    return replace(_with_kept(draft, kept), tokens=draft.tokens[:end], routed_experts=routed_experts, **cut)


def with_sampled(draft: Sample, completion: Completion, policy_version: int) -> Sample:
    """The draft, extended by the tokens that the policy sampled."""
    draft = _with_kept(draft, _joined_kept(draft, completion.kept, len(completion.tokens)))
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
    draft = _with_kept(draft, _joined_kept(draft, None, len(tokens)))
    return replace(
        draft,
        tokens=np.append(draft.tokens, np.asarray(tokens, dtype=np.int32)),
        log_probs=np.append(draft.log_probs, np.zeros(len(tokens), dtype=np.float32)),
        response_mask=np.append(response_mask, np.zeros(len(tokens), bool)),
        tool_tokens=draft.tool_tokens + len(tokens),
        token_versions=_versions(draft, len(tokens), last_version(draft)),
    )


def _joined_kept(draft: Sample, kept: KeptTokens | None, length: int) -> KeptTokens | None:
    """Kept tokens of a draft that becomes ``length`` tokens longer."""
    if draft.kept is None and kept is None:
        return None
    return KeptTokens.joined([draft.kept or KeptTokens.whole(draft.response_len), kept or KeptTokens.whole(length)])


def _with_kept(draft: Sample, kept: KeptTokens | None) -> Sample:
    both = (None, None) if kept is None else (kept.tokens, kept.counts)
    return replace(draft, kept_tokens=both[0], kept_counts=both[1])


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
