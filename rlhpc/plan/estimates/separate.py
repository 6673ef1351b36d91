"""Seconds of a step whose ranks either train or generate, both at once, with their idle shares and staleness.

Step s trains on batch s, which may begin once version s - max_staleness is there. A step therefore takes the longest of

- the engines' time for a batch with all slots full: long responses of one batch run beside those of the next,
- the trainers' time,
- (makespan of a batch + training + weight sync) / (max_staleness + 1): as many batches are in flight at once. With
  dynamic sampling, the makespan includes the time until dropped groups have been replaced.

The first and second of these are each side's work, the third is the bound's. With placement lend, trainers' ranks take
over a part of the engines' work in the time that they would wait.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Literal

from rlhpc.config.rollout import AsynchronySection
from rlhpc.plan.estimates.rollout_time import Engines, cache_tokens, decoding_step, prompts_time
from rlhpc.plan.estimates.roofline import Parts, PhaseTime, total
from rlhpc.plan.estimates.workload import StepWorkload, response_lengths
from rlhpc.sharding.layout import ParallelLayout

Limit = Literal["engines", "trainers", "staleness"]
LIMIT_TEXTS = {
    "engines": "the engines have more work than the trainers",
    "trainers": "the trainers have more work than the engines",
    "staleness": "both sides wait for each other (asynchrony.max_staleness)",
}


@dataclass(frozen=True)
class StagedSync:
    """Seconds of a weight sync between two sides: ``stage`` stops trainers, ``write`` engines, neither ``transfer``."""

    stage: float
    transfer: float
    write: float
    sent_across: float  # bytes to other nodes, of all ranks
    received: float  # bytes of a rank of an engine

    @property
    def seconds(self) -> float:
        return self.stage + self.transfer + self.write


@dataclass(frozen=True)
class SeparateStep:
    """A step's seconds of each side. ``engines``: with full slots; ``makespan``: of a batch by itself. ``lenders``: for
    each engine those on trainers' ranks, which need ``lend_overhead`` to begin."""

    engines: float
    trainers: float
    makespan: float
    sync: float  # until engines have new weights, beside the trainers' own part
    max_staleness: int
    replacing: float = 0.0  # until groups that the filter drops have been replaced
    lenders: float = 0.0
    lend_overhead: float = 0.0

    @property
    def in_turn(self) -> float:
        """Seconds of a batch from its first response until engines have the weights that it trained."""
        return self.makespan + self.replacing + self.trainers + self.sync

    @property
    def bounds(self) -> dict[Limit, float]:
        """Seconds that each limit allows a step at least."""
        chain = self.in_turn / (self.max_staleness + 1)
        return {"engines": self.engines_helped, "trainers": self.trainers, "staleness": chain}

    @property
    def engines_helped(self) -> float:
        """The engines' work, less what lenders do while the trainers would wait."""
        busy = self.trainers + self.lend_overhead
        return min(self.engines, (self.engines + self.lenders * busy) / (1 + self.lenders))

    @property
    def seconds(self) -> float:
        return max(self.bounds.values())

    @property
    def limit(self) -> Limit:
        """Limit that determines the step's time."""
        return max(self.bounds, key=self.bounds.__getitem__)

    @property
    def idle_engines(self) -> float:
        """Share of a step in which an engine has no request."""
        return max(0.0, 1 - max(self.engines_helped, self.makespan) / self.seconds)

    @property
    def idle_trainers(self) -> float:
        """Share of a step in which trainers wait for responses, or generate."""
        return 1 - self.trainers / self.seconds

    @property
    def staleness(self) -> float:
        """Mean age of the oldest token of a response, in steps. A batch waits for its version unless engines limit."""
        if self.limit != "engines":
            return float(self.max_staleness)
        alone = self.makespan + self.replacing
        return min(self.max_staleness, max(0.0, alone - self.engines_helped / 2) / self.seconds)


def separate_step(
    engines: Engines,
    work: StepWorkload,
    section: AsynchronySection,
    sync: StagedSync,
    seconds: tuple[float, float],
    scoring: float = 0.0,
) -> SeparateStep:
    """Returns the step's times. ``seconds``: of a batch's responses by themselves, and of training; ``scoring``: of
    models beside the engines, which make no step meanwhile."""
    makespan, training = seconds[0] + scoring, seconds[1]
    full = full_slots_time(engines, work, section) + scoring + sync.write
    if section.in_flight == "finish":  # engines run empty before each switch
        full = max(full, makespan + sync.write)
    trainers = training + sync.stage
    # A drop counts as long after the group's end as a step of the trainers, and only then another group may start.
    alone = work.longest * _sum(decoding_step(engines, 1, mean_context(work)))
    replacing = (work.generated / work.samples - 1) * (trainers + min(makespan, alone))
    return SeparateStep(full, trainers, makespan, sync.transfer + sync.write, section.max_staleness, replacing)


def full_slots_time(engines: Engines, work: StepWorkload, section: AsynchronySection) -> float:
    """Returns the seconds of a batch's responses on engines whose slots are always full, and of what a switch to new
    weights computes again."""
    responses, context = work.generated / engines.count, mean_context(work)
    slots = full_slots(engines, work, section.max_staleness)
    shared = 1 / work.group if engines.section.prefix_caching else 1.0
    parts = prompts_time(engines, responses * shared * work.prompt)
    if section.in_flight == "recompute":
        parts = total(parts, prompts_time(engines, slots * (context - work.prompt * (1 - shared))))
    return responses * work.response / slots * _sum(decoding_step(engines, slots, context)) + _sum(parts)


def full_slots(engines: Engines, work: StepWorkload, max_staleness: int) -> float:
    """Returns the most responses that an engine has at once: its slots, its cache's room, the batches in flight."""
    room = cache_tokens(engines) / (mean_context(work) or 1.0)
    in_flight = (max_staleness + 1) * work.generated / engines.count
    return max(1.0, min(engines.section.sequences, room, in_flight))


def mean_context(work: StepWorkload) -> float:
    """Returns the mean tokens of a sequence over the steps that it runs."""
    lengths = response_lengths(256, work.response, work.longest, work.spread)
    return work.prompt + sum(length * length for length in lengths) / (2 * sum(lengths))


def staged_sync(engines: Engines, training: ParallelLayout, together: int) -> StagedSync:
    """Returns the times of a weight sync from ``training``'s ranks: staged in CPU memory on both sides, and sent over
    the network once to each ``together`` ranks, or to each engine that takes more."""
    machine, section = engines.machine, engines.section
    own = (engines.dense + engines.experts) * engines.itemsize  # of an engine's rank
    model, per_node = own * section.tp, min(together, engines.ranks)
    receivers = engines.count if section.tp >= per_node else ceil(engines.ranks / per_node)
    staged = min(model / (training.tp * training.pp), model * receivers / training.world_size)
    within = training.world_size + engines.ranks <= machine.linked
    across = 0.0 if within else receivers * model
    beside = max(1, per_node // section.tp)  # ranks of a node that need the same block
    moving = machine.exchange(own * (1 - (0 if within else 1 / beside)), min(machine.linked, 2))
    if across:
        most = max(across / training.world_size, own / beside)
        moving = total(moving, machine.exchange(most, 2, machine.linked))
    parts = {"stage": machine.to_cpu(staged), "transfer": _sum(moving)}
    parts["write"] = machine.to_cpu(own) + machine.memory(2 * own)
    return StagedSync(**machine.calibrated("weight sync", parts), sent_across=across, received=own)


def sync_phase(sync: StagedSync) -> PhaseTime:
    """Returns the weight sync as a phase, bottleneck by bottleneck."""
    network = "network" if sync.sent_across else "node"
    parts = {"cpu_memory": sync.stage + sync.write, network: sync.transfer}
    return PhaseTime("weight sync", parts, 0.0, sync.received)


def _sum(parts: Parts) -> float:
    return sum(parts.values())
