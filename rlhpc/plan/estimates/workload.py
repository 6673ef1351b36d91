"""Size of a step: tokens that it generates and trains on, and its operations.

Model FLOPs are those of ``rlhpc.models.flops``: without padding, without anything that is computed twice. What a
backward pass repeats is counted apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import ceil, exp, log
from statistics import NormalDist

from rlhpc.config.algorithm import WITH_CRITIC
from rlhpc.config.schema import RunConfig
from rlhpc.config.training import MemorySection
from rlhpc.models import ModelDescription
from rlhpc.models.flops import feed_forward_weights, forward_terms, head_rows, shared_expert_weights

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


PHASES = ("rollout", "reward_model", "log_probs", "update")
_TERA = 1e12


@dataclass(frozen=True)
class PhaseWork:
    """Model FLOPs over all ranks, FLOPs that the backward pass repeats, and the tokens that count for speed."""

    flops: float
    tokens: int
    repeated: float = 0.0

    def __add__(self, other: PhaseWork) -> PhaseWork:
        """Both, one after the other, on the same tokens."""
        return PhaseWork(self.flops + other.flops, max(self.tokens, other.tokens), self.repeated + other.repeated)


@dataclass(frozen=True)
class SequenceLengths:
    """Sequences by their tokens, and pairs of a token and one that it attends to."""

    tokens: int
    pairs: int

    @classmethod
    def of(cls, lengths: Sequence[int]) -> SequenceLengths:
        """Operations of packed sequences with these numbers of tokens."""
        return cls(sum(lengths), _pairs(sum(lengths), sum(length * length for length in lengths)))


@dataclass(frozen=True)
class Response:
    """SequenceLengths of a response that an engine generated. ``sampled``: tokens of it that the policy sampled."""

    prompt_id: int
    prompt: int
    whole: int
    sampled: int


def forward_work(shape: ModelDescription, lengths: SequenceLengths) -> PhaseWork:
    """Returns one forward pass."""
    of_token, of_pair = forward_terms(shape)
    return PhaseWork(of_token * lengths.tokens + of_pair * lengths.pairs, lengths.tokens)


def update_work(shape: ModelDescription, memory: MemorySection, lengths: SequenceLengths, epochs: int = 1) -> PhaseWork:
    """Returns the forward and backward passes of all epochs."""
    flops = 3 * forward_work(shape, lengths).flops
    return PhaseWork(epochs * flops, lengths.tokens, epochs * repeated_flops(shape, memory, lengths))


def repeated_flops(shape: ModelDescription, memory: MemorySection, lengths: SequenceLengths) -> float:
    """Returns the operations of a backward pass that repeat some of the forward pass: recomputed activations, the
    products of queries and keys, which attention kernels compute again, and logits."""
    of_token, of_pair = forward_terms(shape)
    head = 2.0 * head_rows(shape) * shape.hidden_size
    logits = 0.0 if shape.head == "value" else head * lengths.tokens
    scores = 2.0 * shape.num_layers * shape.num_heads * shape.head_dim * lengths.pairs
    if memory.recompute == "full":  # all layers; the head is none of them
        return scores + logits + (of_token - head) * lengths.tokens + of_pair * lengths.pairs
    modules = memory.recompute_modules if memory.recompute == "selective" else []
    weights = sum(_repeated_weights(shape, layer, modules) for layer in range(shape.num_layers))
    attention = of_pair * lengths.pairs if "core_attn" in modules else 0.0
    return scores + logits + 2.0 * weights * lengths.tokens + attention


def rollout_work(shape: ModelDescription, responses: Iterable[Response], *, shared_prompts: bool) -> PhaseWork:
    """Returns the operations of generating. ``shared_prompts``: responses to one prompt compute it once. The output
    projection is only of sampled tokens, and the last token of a response is not computed."""
    of_token, of_pair = forward_terms(shape)
    head = 2.0 * head_rows(shape) * shape.hidden_size
    tokens = pairs = sampled = 0
    seen: set[int] = set()
    for response in responses:
        skipped = response.prompt if shared_prompts and response.prompt_id in seen else 0
        seen.add(response.prompt_id)
        last = response.whole - 1
        tokens += last - skipped
        pairs += _pairs(last, last * last) - _pairs(skipped, skipped * skipped)
        sampled += response.sampled
    return PhaseWork((of_token - head) * tokens + of_pair * pairs + head * sampled, sampled)


def rates(
    phases: Mapping[str, PhaseWork], seconds: Mapping[str, float], ranks: int, peak: float | None
) -> dict[str, float]:
    """Returns the metrics of phases that took ``seconds``, on ``ranks`` GPUs of ``peak`` TFLOP/s each (None: unknown).

    ``seconds[""]`` is the whole step.
    """
    found: dict[str, float] = {}
    timed = {name: work for name, work in phases.items() if seconds.get(name, 0.0) > 0}
    for name, work in timed.items():
        speed = work.flops / (seconds[name] * ranks * _TERA)
        found |= _of_phase(f"_{name}", speed, work.tokens / (seconds[name] * ranks), peak)
    if seconds.get("", 0.0) > 0 and phases:
        speed = sum(work.flops for work in phases.values()) / (seconds[""] * ranks * _TERA)
        found["perf/tflops_per_gpu"] = speed
        if peak is not None:
            found["perf/mfu"] = speed / peak
    update = phases.get("update")
    if update is not None and update.flops:
        found["perf/recompute_fraction"] = update.repeated / update.flops
        if "perf/mfu_update" in found:
            found["perf/hfu_update"] = found["perf/mfu_update"] * (1 + update.repeated / update.flops)
    return found


def _of_phase(suffix: str, tflops: float, tokens_per_second: float, peak: float | None) -> dict[str, float]:
    found = {
        f"perf/tflops_per_gpu{suffix}": tflops,
        f"perf/tokens_per_second_per_gpu{suffix}": tokens_per_second,
    }
    return found if peak is None else {**found, f"perf/mfu{suffix}": tflops / peak}


def _pairs(tokens: int, squares: int) -> int:
    """Half of the squares, diagonal included."""
    return (squares + tokens) // 2


def _repeated_weights(shape: ModelDescription, layer: int, modules: Sequence[str]) -> int:
    """Returns the weights of a layer that a token is multiplied with once more."""
    experts = shape.experts
    if experts is None or layer not in experts.layers:
        return feed_forward_weights(shape, layer) if "mlp" in modules else 0
    weights = feed_forward_weights(shape, layer) if "moe" in modules else 0
    return weights + (shared_expert_weights(shape) if "shared_experts" in modules else 0)
