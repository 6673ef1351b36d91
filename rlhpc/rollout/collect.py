"""From a step's prompts to this engine's scored samples. Which engine answers what is decided by arithmetic alone."""

from __future__ import annotations

import hashlib
import itertools
import struct
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from rlhpc.api import Completion, Prompt, Request, RolloutEngine, Sample
from rlhpc.core.heartbeat import touch


@dataclass(frozen=True)
class Sampling:
    """How the prompts of one step are answered."""

    samples_per_prompt: int
    max_tokens: int
    temperature: float  # 0: greedy
    top_p: float
    seed: int
    step: int


@dataclass(frozen=True)
class RolloutPlan:
    """The prompts of a step, by position, that each engine answers."""

    shares: tuple[range, ...]


def plan_requests(num_prompts: int, num_engines: int) -> RolloutPlan:
    """Contiguous shares that differ by at most one prompt. A prompt's samples stay on one engine, which keeps their
    common prefix in its cache once."""
    bounds = [num_prompts * index // num_engines for index in range(num_engines + 1)]
    return RolloutPlan(tuple(range(start, stop) for start, stop in itertools.pairwise(bounds)))


def request_seed(seed: int, step: int, prompt_id: int, sample_index: int) -> int:
    """63 well-mixed bits that depend on nothing but the arguments: not on ranks, engines or batches."""
    digest = hashlib.blake2b(struct.pack("<4Q", seed, step, prompt_id, sample_index), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def build_requests(prompts: Sequence[Prompt], share: range, sampling: Sampling) -> list[Request]:
    """``samples_per_prompt`` requests for each prompt of the share, in order.

    A prompt that occurs again in the step goes on counting its samples, so that no two of them are the same.
    """
    count = sampling.samples_per_prompt
    seen = Counter(prompt.prompt_id for prompt in prompts[: share.start])
    requests = []
    for position in share:
        prompt = prompts[position]
        first = seen[prompt.prompt_id] * count
        seen[prompt.prompt_id] += 1
        requests += [
            Request(
                prompt=prompt.tokens,
                seed=request_seed(sampling.seed, sampling.step, prompt.prompt_id, index),
                max_tokens=sampling.max_tokens,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
            )
            for index in range(first, first + count)
        ]
    return requests


def collect(
    engine: RolloutEngine,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    *,
    engine_index: int,
    num_engines: int,
    weights_version: int,
    score: Callable[[Prompt, Completion], float],
) -> list[Sample]:
    """Answer and score this engine's share of the step's prompts, in the step's order.

    ``group_id`` is the prompt's position in the step. The ranks of one engine return the same samples.
    """
    share = plan_requests(len(prompts), num_engines).shares[engine_index]
    completions = engine.generate(build_requests(prompts, share, sampling))
    samples = []
    for index, completion in enumerate(completions):
        touch("score")
        group = share.start + index // sampling.samples_per_prompt
        prompt = prompts[group]
        samples.append(
            Sample(
                prompt_id=prompt.prompt_id,
                group_id=group,
                tokens=np.concatenate([np.asarray(prompt.tokens, dtype=np.int32), completion.tokens]),
                prompt_len=len(prompt.tokens),
                log_probs=completion.log_probs,
                reward=float(score(prompt, completion)),
                weights_version=weights_version,
                truncated=completion.truncated,
                routes=completion.routes,
            )
        )
    return samples
