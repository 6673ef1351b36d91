"""Seconds of a rollout and of a weight sync.

A decoding step reads the active weights and the KV cache of its sequences, as many as the cache holds. The simulation
advances from one finished sequence to the next, so that the tail with few long responses is counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush
from math import ceil

from rlhpc.config.rollout import RolloutSection
from rlhpc.models import ModelDescription
from rlhpc.models.flops import forward_terms
from rlhpc.plan.estimates.memory import EngineMemory, engine_bytes
from rlhpc.plan.estimates.rank_memory import ITEMSIZE
from rlhpc.plan.estimates.roofline import MachineSpeed, PhaseTime, times, total
from rlhpc.plan.estimates.train_time import stage_parameters
from rlhpc.plan.estimates.workload import StepWorkload, response_lengths
from rlhpc.sharding.engine_shards import EngineLayout, engine_vocab
from rlhpc.sharding.layout import ParallelLayout

# Kernels launched per layer in decoding, counted in vLLM's model files: of a dense layer, and those added by latent
# attention, experts, groups of experts and shared experts.
DECODING_KERNELS = {"dense": 12, "latent": 14, "experts": 8, "groups": 12, "shared": 4}
_MOST_SIMULATED = 32768  # responses of an engine; beyond, time is proportional
_SPREAD_ORDER = 0.618  # the golden section spreads lengths evenly over time


@dataclass(frozen=True)
class Engines:
    """Engines of ``section.tp`` ranks each on ``ranks`` ranks."""

    shape: ModelDescription
    section: RolloutSection
    machine: MachineSpeed
    ranks: int
    dtype: str = "bfloat16"

    @property
    def count(self) -> int:
        return max(1, self.ranks // self.section.tp)

    @property
    def layout(self) -> EngineLayout:
        return EngineLayout(self.section.tp, self.section.expert_parallel and self.shape.experts is not None)

    @cached_property
    def memory(self) -> EngineMemory:
        """Memory of each rank."""
        return engine_bytes(self.section, self.shape, self.dtype, self.machine.gpu.memory_bytes)

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.dtype]

    @cached_property
    def dense(self) -> float:
        """Parameters of a rank outside of experts."""
        shape = self.shape
        ends = 1 if shape.tied_embeddings else 2
        layers = stage_parameters(shape, ParallelLayout(1))[0].dense - ends * shape.vocab_size * shape.hidden_size
        return (layers + ends * engine_vocab(shape.vocab_size) * shape.hidden_size) / self.section.tp

    @cached_property
    def experts(self) -> float:
        """Parameters of a rank in experts."""
        return stage_parameters(self.shape, ParallelLayout(1))[0].experts / self.section.tp

    @cached_property
    def terms(self) -> tuple[float, float]:
        """Operations per token and per pair of tokens."""
        return forward_terms(self.shape)


def cache_tokens(engines: Engines) -> int:
    """Returns the tokens that an engine's cache holds; 0 if weights leave no room."""
    return max(0, engines.memory.tokens)


def rollout_time(engines: Engines, work: StepWorkload) -> PhaseTime | None:
    """Returns the time of the engine that finishes last; None if its cache does not hold one response."""
    shape, room = engines.shape, cache_tokens(engines)
    if room < work.prompt + work.longest:
        return None
    responses = ceil(work.generated / engines.count)
    followed = min(responses, _MOST_SIMULATED)
    runs = _runs(engines, followed, room, work)
    parts: dict[str, float] = {}
    for steps, running, context in runs:
        parts = total(parts, times(decoding_step(engines, running, context), steps * responses / followed))
    whole = work.generated * (1 / work.group if engines.section.prefix_caching else 1.0)  # prompts that are computed
    prompts = ceil(whole / engines.count) * work.prompt
    parts = total(parts, prompts_time(engines, prompts))
    of_token, of_pair = engines.terms
    flops = work.generated * work.length * (of_token + of_pair * work.pairs)
    token_steps = sum(steps for steps, _, _ in runs) * responses / followed
    tokens = responses * work.response + prompts
    sent = 4 * tokens * shape.num_layers * shape.hidden_size * engines.itemsize * (1 - 1 / engines.section.tp)
    most = max(running for _, running, _ in runs)
    notes = {"token steps": token_steps, "at once": most, "max_num_seqs": engines.section.sequences}
    return PhaseTime("rollout", parts, flops, sent, notes)


def weight_sync_time(engines: Engines, training: ParallelLayout, method: str = "direct", shards: int = 1) -> PhaseTime:
    """Returns the time of a weight sync. Each rank receives what it lacks, from its node as far as that has it; with
    ``gather``, the whole model. ``shards``: ranks over which FSDP2 shards all weights alike.

    Shares assume independent cuts of the two sides; the actual overlap may differ a little.
    """
    machine, size = engines.machine, engines.itemsize
    tp = engines.section.tp
    received = {"node": 0.0, "network": 0.0}
    for wanted, cut in ((engines.dense * size, training.tp), (engines.experts * size, training.etp * training.ep)):
        own, nearby = _shares(training, cut, tp, machine.linked)
        if shards > 1:  # by rows of each weight, across the engines' cuts
            own, nearby = 1 / shards, min(1.0, machine.linked / shards)
        if method == "gather":
            wanted, own = wanted * tp, 1 / (cut * training.pp * shards)
        received["node"] += wanted * (nearby - own)
        received["network"] += wanted * (1 - nearby)
    moved = 2 * (engines.dense + engines.experts) * size  # each byte is read and written, at both ends of a copy
    parts = total(
        machine.exchange(received["node"], min(machine.linked, training.world_size)),
        machine.exchange(received["network"], 2, machine.linked) if received["network"] else {},
        {"memory": 2 * machine.memory(moved)},
    )
    return PhaseTime("weight sync", machine.calibrated("weight sync", parts), 0.0, sum(received.values()))


def _shares(training: ParallelLayout, cut: int, tp: int, node: int) -> tuple[float, float]:
    """Returns the shares of an engine rank's weights that rank and node have; training cuts them ``cut`` times."""
    # Both sides cut among neighbouring ranks: where one cut refines the other, every rank has its part.
    nested = tp % cut == 0 or cut % tp == 0
    own = (min(1.0, tp / cut) if nested else 1 / cut) / training.pp
    if training.pp > 1 and tp > cut:
        own = 1 / (cut * training.pp)
    stages = max(1, node // max(1, training.world_size // training.pp))  # on a node
    return own, max(own, min(1.0, node / cut) * min(1.0, stages / training.pp))


def decoding_step(engines: Engines, running: float, context: float) -> dict[str, float]:
    """Returns the seconds of one decoding step of ``running`` sequences of ``context`` tokens."""
    shape, section, machine = engines.shape, engines.section, engines.machine
    of_token, of_pair = engines.terms
    met = 1.0
    if shape.experts:
        met -= (1 - shape.experts.top_k / shape.experts.num_experts) ** running
    embedding = 0 if shape.tied_embeddings else shape.vocab_size * shape.hidden_size / section.tp
    weights = (engines.dense - embedding + met * engines.experts) * engines.itemsize
    moved = machine.decode(weights + running * context * engines.memory.token)
    flops = running * (of_token + of_pair * context) / section.tp
    computing = machine.compute(flops)
    parts = {"memory": moved} if moved >= computing else {"compute": computing}
    size = 2 * (section.tp - 1) / section.tp * running * shape.hidden_size * engines.itemsize * 2 * shape.num_layers
    parts = total(parts, machine.ring(size, section.tp, 1, messages=2 * shape.num_layers))
    efficiency = machine.efficiency
    kernel = efficiency.graph_us if section.cuda_graphs else efficiency.kernel_us
    return machine.calibrated("rollout", total(parts, {"kernels": 1e-6 * kernel * _kernels(shape)}))


def _kernels(shape: ModelDescription) -> int:
    count, experts = shape.num_layers * DECODING_KERNELS["dense"], shape.experts
    if shape.latent:
        count += shape.num_layers * DECODING_KERNELS["latent"]
    if experts:
        more = {"experts": True, "groups": bool(experts.num_groups), "shared": bool(experts.shared_ffn_size)}
        count += len(experts.layers) * sum(DECODING_KERNELS[name] for name, there in more.items() if there)
    return count


def prompts_time(engines: Engines, tokens: float) -> dict[str, float]:
    """Returns the seconds in which ``tokens`` of prompts are computed."""
    shape, section, machine = engines.shape, engines.section, engines.machine
    size = 4 * tokens * shape.num_layers * shape.hidden_size * engines.itemsize * (1 - 1 / section.tp)
    computing = {"compute": machine.compute(2 * _active(shape) * tokens / section.tp)}
    exchanging = machine.ring(size, section.tp, 1, messages=2 * shape.num_layers)
    return machine.calibrated("rollout", total(computing, exchanging))


def _active(shape: ModelDescription) -> float:
    return forward_terms(shape)[0] / 2 - shape.vocab_size * shape.hidden_size


def _runs(engines: Engines, responses: int, room: float, work: StepWorkload) -> list[tuple[int, int, float]]:
    """Returns (token steps, concurrent sequences, their mean context) between consecutive ends of sequences."""
    lengths = list(response_lengths(responses, work.response, work.longest, work.spread))
    # The longest of all engines is on the one that finishes last.
    among = min(max(work.generated, responses), _MOST_SIMULATED)
    lengths[-1] = response_lengths(among, work.response, work.longest, work.spread)[-1]
    # A group's prompt is in the cache once.
    shared = work.prompt / (work.group if engines.section.prefix_caching else 1)
    waiting = _mixed(lengths)
    running: list[int] = []  # token steps at which each one ends
    began: dict[int, list[int]] = {}
    now, starts, runs = 0, 0, []
    most = min(engines.section.sequences, responses)
    mean = shared + work.response * 0.75  # of a sequence that runs: it is cut, not begun, when the cache is full
    most = max(1, min(most, int(room / mean)))
    pending = next(waiting, None)
    while running or pending is not None:
        while pending is not None and len(running) < most:
            heappush(running, now + pending)
            began.setdefault(now + pending, []).append(now)
            starts += now
            pending = next(waiting, None)
        end = heappop(running)
        middle = (now + end) / 2
        count = len(running) + 1
        if end > now:
            runs.append((end - now, count, work.prompt + max(0.0, middle - starts / count)))
        starts -= began[end].pop()
        now = end
    return runs


def _mixed(lengths: list[int]) -> Iterator[int]:
    """Yields every length once, long and short ones mixed."""
    for i in sorted(range(len(lengths)), key=lambda i: (i * _SPREAD_ORDER) % 1.0):
        yield lengths[i]
