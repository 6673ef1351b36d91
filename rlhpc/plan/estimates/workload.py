"""Size of a step: what it generates and trains on, from the configuration and mean lengths."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import ceil, exp, log
from statistics import NormalDist

from rlhpc.config.algorithm import WITH_CRITIC
from rlhpc.config.schema import RunConfig

_BISECTIONS = 60
_MOST_PACKED = 256  # samples of a rank; beyond, the number of microbatches is proportional


@dataclass(frozen=True)
class StepWorkload:
    """One step over all ranks. Lengths are means; ``spread``: standard deviation of response lengths' logarithm."""

    samples: int  # trained on
    generated: int  # requested; more with dynamic sampling
    group: int  # of one prompt
    prompt: float
    response: float
    longest: int  # bound on responses
    spread: float
    updates: int  # of the optimizer
    epochs: int
    policy_pass: bool  # log-probs of the policy before the first update
    reference_pass: bool
    critic: bool

    @property
    def length(self) -> float:
        return self.prompt + self.response

    @property
    def tokens(self) -> float:
        """Tokens trained on, prompts included."""
        return self.samples * self.length

    @cached_property
    def pairs(self) -> float:
        """Mean number of tokens that a token attends to."""
        lengths = response_lengths(256, self.response, self.longest, self.spread)
        whole = [self.prompt + length for length in lengths]
        return sum(length * (length + 1) / 2 for length in whole) / sum(whole)


def step_workload(config: RunConfig) -> StepWorkload:
    """Returns the configured step; lengths are those of the section ``planning``, or half of the bounds."""
    train, rollout, section = config.train, config.rollout, config.planning
    samples = train.prompts_per_step * rollout.samples_per_prompt
    batches = section.sampling_batches if train.dynamic_sampling else 1.0
    updates = train.minibatches * train.epochs
    longest, kl = rollout.max_response_tokens, config.algorithm.kl
    return StepWorkload(
        samples=samples,
        generated=round(samples * batches),
        group=rollout.samples_per_prompt,
        prompt=min(section.prompt_tokens or config.data.max_prompt_tokens / 2, config.data.max_prompt_tokens),
        response=min(section.response_tokens or longest / 2, longest),
        longest=longest,
        spread=section.response_spread,
        updates=updates,
        epochs=train.epochs,
        policy_pass=updates > 1 or (kl.placement == "reward" and kl.coefficient > 0),
        reference_pass=kl.coefficient > 0,
        critic=config.algorithm.name in WITH_CRITIC,
    )


def microbatches(work: StepWorkload, samples: int, capacity: int) -> int:
    """Returns the number of microbatches of at most ``capacity`` tokens for so many samples, or of one longer sample.
    Packed by first fit, the longest first, as rlhpc/data/packing.py does."""
    followed = min(samples, _MOST_PACKED)
    bins = _bins(followed, work.prompt, work.response, work.longest, work.spread, capacity)
    return ceil(bins * samples / followed)


@lru_cache(maxsize=4096)
def _bins(count: int, prompt: float, response: float, longest: int, spread: float, capacity: int) -> int:
    room: list[float] = []
    for length in reversed(response_lengths(count, response, longest, spread)):
        place = next((place for place, free in enumerate(room) if free >= prompt + length), None)
        if place is None:
            place = len(room)
            room.append(capacity)
        room[place] -= prompt + length
    return len(room)


@lru_cache(maxsize=256)
def response_lengths(count: int, mean: float, longest: int, spread: float) -> tuple[int, ...]:
    """Returns ``count`` evenly spaced quantiles of a log-normal distribution, cut off at ``longest``, with that mean.

    Shortest first.
    """
    normal = NormalDist()
    scores = [normal.inv_cdf((i + 0.5) / count) for i in range(count)]

    def lengths(middle: float) -> list[float]:
        return [min(longest, exp(middle + spread * score)) for score in scores]

    low, high = log(mean) - spread**2 - 1, log(longest) + 4 * spread + 1
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(lengths(middle)) < mean * count else (low, middle)
    return tuple(max(1, round(length)) for length in lengths(high))
