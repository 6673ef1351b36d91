"""Compares generation in turn with training and on ranks of its own, over all splits of the GPUs.

Each split is estimated from the fastest colocated layout, whose training time grows as ranks leave it; the splits with
the best estimates are then searched like any configuration. Steps of the best of each placement are then simulated.
The best splits are simulated with placement lend as well, in layouts that leave trainers' ranks room for an engine.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from math import inf, log2
from typing import Any

from rlhpc.config.reward import RewardModelSection
from rlhpc.config.rollout import AsynchronySection, JudgesSection
from rlhpc.config.schema import RunConfig
from rlhpc.config.site import EfficiencySection
from rlhpc.core.errors import UserError
from rlhpc.models import ModelDescription
from rlhpc.plan.checks.limits import holds_sequence
from rlhpc.plan.checks.parallelism import check_engine
from rlhpc.plan.checks.placement import check_placement, check_roles, separates
from rlhpc.plan.estimates.hardware import Gpu
from rlhpc.plan.estimates.memory import engine_section
from rlhpc.plan.estimates.rollout_time import Engines, decoding_step
from rlhpc.plan.estimates.roofline import MachineSpeed
from rlhpc.plan.estimates.separate import full_slots_time, mean_context
from rlhpc.plan.estimates.workload import step_workload
from rlhpc.plan.layouts import legal_layouts
from rlhpc.plan.scenario import changed_config
from rlhpc.plan.search import Candidate, SearchResult, cut_of, fastest
from rlhpc.plan.simulation import simulate
from rlhpc.rollout.schedule.generation_load import Simulated
from rlhpc.sharding.layout import ParallelLayout, divisors
from rlhpc.sharding.placement import judge_ranks, training_ranks

Cut = tuple[int, ...]  # of the model: tp, pp, cp, ep, etp

_OTHERS = 16  # layouts tried of a split, beside those that cut the model like the search's results
_SEARCHED = 4  # splits with the best estimates
_LENT = 2  # of them, with the shortest simulated steps, that are tried with placement lend
_FEW_NODES, _PARTS = 4, 4  # up to so many nodes, so many parts of each are tried
_CLEARLY = 1.01  # times as fast as the others, from which on lend is worth its memory
_CLOSE = 1.1  # times the shortest predicted step, up to which a split is simulated
_BESIDE, _ALONE = 0.6, 0.9  # rollout.gpu_memory_utilization of engines beside a trainer, and on GPUs of their own
_PASSES = 4  # of a forward's operations: forward and backward of an update, and one log-prob pass


@dataclass(frozen=True)
class Placements:
    """The fastest configuration of each placement, None if none fits. ``simulated``: steps of colocated and separate,
    ``lending``: with placement lend."""

    colocated: Candidate | None
    separate: Candidate | None
    simulated: tuple[Simulated, Simulated] | None = None
    splits: int = 0  # numbers of ranks that may generate
    reason: str = ""  # why there is none with ranks of its own
    lend: Candidate | None = None
    lending: Simulated | None = None

    @property
    def speedup(self) -> float | None:
        """Time of a colocated step over that of a separate one, both simulated."""
        if self.simulated is None:
            return None
        return self.simulated[0].step_seconds / self.simulated[1].step_seconds

    @property
    def lend_speedup(self) -> float | None:
        """Time of a step of the faster of these two over that of one with placement lend, all simulated."""
        if self.simulated is None or self.lending is None:
            return None
        return min(one.step_seconds for one in self.simulated) / self.lending.step_seconds

    @property
    def winner(self) -> Candidate | None:
        """The fastest of them; the simpler, colocated, then separate, if they are equal."""
        if self.speedup is None:
            return self.colocated or self.separate
        if self.lend_speedup is not None and self.lend_speedup >= _CLEARLY:
            return self.lend
        return self.separate if self.speedup > 1 else self.colocated


def compare_placements(
    config: RunConfig, shape: ModelDescription, gpu: Gpu, efficiency: EfficiencySection, found: SearchResult
) -> Placements:
    """Returns the fastest of each placement on the job's GPUs. ``found``: a search of the config as it is; empty if
    nothing fits."""
    first = next((one for one in found.best if not one.lacks), None)
    if separates(config):
        alike = _colocated(config)
        layouts = list(legal_layouts(alike, shape, config.world_size, gpu))
        colocated = fastest(alike, shape, layouts, gpu, efficiency)
    else:
        colocated, first = first, None
    lent, first = (first, None) if config.placement == "lend" else (None, first)
    comparison = _Comparison(config, shape, gpu, efficiency, colocated, _cuts(config, found))
    splits = list(_splits(config))
    try:
        if splits:
            check_placement(_separate(config, splits[0]))
    except UserError as error:
        return Placements(colocated, None, reason=f"{error.where}: {error.message}")
    tried = [one for one in (first, *comparison.search(splits)) if one is not None]
    steps = [simulate(one.config, shape, one.step, gpu, efficiency) for one in tried]
    if not tried:
        reason = "no split fits" if splits else "a job of one rank has none to spare"
        return Placements(colocated, None, splits=len(splits), reason=reason)
    order = sorted(range(len(tried)), key=lambda number: steps[number].step_seconds)
    best, simulated = order[0], None
    if colocated is not None:
        simulated = simulate(colocated.config, shape, colocated.step, gpu, efficiency), steps[best]
    lend, lending = comparison.lending([tried[number] for number in order[:_LENT]], lent)
    return Placements(colocated, tried[best], simulated, len(splits), lend=lend, lending=lending)


def _splits(config: RunConfig) -> Iterator[int]:
    """Yields numbers of ranks that may generate: on many nodes whole ones, else also parts of a node."""
    nodes, per_node = config.slurm.most_nodes, config.resources.ranks_per_node
    unit = 1 if nodes == 1 else max(1, per_node // _PARTS) if nodes <= _FEW_NODES else per_node
    yield from range(unit, config.world_size, unit)


def _separate(config: RunConfig, ranks: int) -> RunConfig:
    changes: dict[str, Any] = {"placement": "separate", "rollout.ranks": ranks, "rollout.nodes": None}
    changes["asynchrony.costs.lend_seconds"] = None
    if config.placement != "separate" and config.rollout.kv_cache_gib is None:
        changes["rollout.gpu_memory_utilization"] = _ALONE
    return changed_config(config, changes)


def _lend(config: RunConfig, ranks: int) -> RunConfig:
    changes: dict[str, Any] = {"placement": "lend", "rollout.ranks": ranks, "rollout.nodes": None}
    changes["asynchrony.in_flight"] = "recompute"
    if config.placement != "lend" and config.rollout.gpu_memory_utilization > _BESIDE:
        changes["rollout.gpu_memory_utilization"] = _BESIDE
    return changed_config(config, changes)


def _colocated(config: RunConfig) -> RunConfig:
    """Returns the config with all models on all ranks."""
    changes: dict[str, Any] = {"placement": "colocated", "rollout.ranks": None, "rollout.nodes": None}
    changes |= {"judges": JudgesSection(), "reference.on": "trainers", "reference.parallel": None}
    changes["critic.on"] = "trainers"
    changes["rewards"] = [
        entry.model_copy(update={"on": "trainers"}) if isinstance(entry, RewardModelSection) else entry
        for entry in config.rewards
    ]
    if config.rollout.gpu_memory_utilization > _BESIDE:
        changes["rollout.gpu_memory_utilization"] = _BESIDE
    return changed_config(config, {**changes, "asynchrony": AsynchronySection()})


def _distance(one: Cut, other: Cut) -> float:
    return sum(abs(log2(a / b)) for a, b in zip(one, other, strict=True))


def _cuts(config: RunConfig, found: SearchResult) -> frozenset[Cut]:
    """Returns how the search's results and the config cut the model; the best also into half as many parts: without an
    engine there is more room."""
    parallel = config.actor.parallel
    cuts = {
        (parallel.tp, parallel.pp, parallel.cp, parallel.ep, parallel.etp),
        *(cut_of(one.layout) for one in found.best),
    }
    for tp, pp, *others in [cut_of(one.layout) for one in found.best[:1]]:
        cuts |= {(max(1, tp // 2), pp, *others), (tp, max(1, pp // 2), *others)}
    return frozenset(cuts)


@dataclass(frozen=True)
class _Comparison:
    config: RunConfig
    shape: ModelDescription
    gpu: Gpu
    efficiency: EfficiencySection
    colocated: Candidate | None
    cuts: frozenset[Cut]

    def search(self, splits: list[int]) -> Iterator[Candidate]:
        """Yields the fastest layouts of the most promising splits that are about as fast as those before."""
        below = inf
        for estimate, ranks in sorted((self._estimate(ranks), ranks) for ranks in splits)[:_SEARCHED]:
            if estimate == inf:
                return
            tried = _separate(self.config, ranks)
            layouts = self._layouts(tried, training_ranks(tried, self.config.world_size))
            candidate = fastest(tried, self.shape, layouts, self.gpu, self.efficiency, below)
            if candidate is not None:
                below = min(below, _CLOSE * candidate.step.seconds)
                yield replace(candidate, asked=self.config)

    def lending(
        self, separate: list[Candidate], configured: Candidate | None
    ) -> tuple[Candidate | None, Simulated | None]:
        """Returns the fastest simulated steps of these splits with placement lend, and of the configured one; None if
        none leaves trainers room for an engine."""
        found = [configured] if configured is not None else []
        for ranks in dict.fromkeys(one.step.engine_ranks for one in separate):
            tried = _lend(self.config, ranks)
            layouts = self._layouts(tried, training_ranks(tried, self.config.world_size))
            candidate = fastest(tried, self.shape, layouts, self.gpu, self.efficiency)
            if candidate is not None:
                found.append(replace(candidate, asked=self.config))
        steps = [simulate(one.config, self.shape, one.step, self.gpu, self.efficiency) for one in found]
        both = zip(found, steps, strict=True)
        return min(both, key=lambda one: one[1].step_seconds, default=(None, None))

    def _layouts(self, tried: RunConfig, training: int) -> list[ParallelLayout]:
        """Returns layouts of ``training`` ranks that cut the model like good ones of the search, and others without
        virtual stages that cut it almost like them."""
        legal = list(legal_layouts(tried, self.shape, training, self.gpu))
        alike = [layout for layout in legal if cut_of(layout) in self.cuts]
        others = [layout for layout in legal if layout.vpp is None and layout not in alike]
        others.sort(key=lambda layout: min(_distance(cut_of(layout), cut) for cut in self.cuts))
        return alike + others[:_OTHERS]

    def _estimate(self, ranks: int) -> float:
        """Returns a step's seconds with ``ranks`` that generate; infinity if no engine suits them."""
        training = self.config.world_size - ranks - judge_ranks(self.config)
        if training < 1:
            return inf
        seconds = self._training_seconds * self.config.world_size / training
        ahead = self.config.asynchrony.max_staleness + 1
        found = [
            max(full, seconds, (max(full, least) + seconds) / ahead)
            for full, least in map(self._generating, self._engines(ranks))
        ]
        return min(found, default=inf)

    def _generating(self, engines: Engines) -> tuple[float, float]:
        """Returns the seconds of a batch with full slots, and of its longest response alone."""
        work = step_workload(self.config)
        full = full_slots_time(engines, work, self.config.asynchrony)
        return full, work.longest * sum(decoding_step(engines, 1, mean_context(work)).values())

    def _engines(self, ranks: int) -> Iterator[Engines]:
        machine = MachineSpeed(self.gpu, self.efficiency, self.config.resources.ranks_per_node)
        for tp in divisors(ranks):
            tried = changed_config(_separate(self.config, ranks), {"rollout.tp": tp})
            with suppress(UserError):
                check_roles(tried, self.config.world_size)
                check_engine(self.shape, tried.rollout)
                if holds_sequence(tried, self.shape, self.gpu.memory_gib):
                    section = engine_section(tried, self.shape, self.gpu.memory_bytes)
                    yield Engines(self.shape, section, machine, ranks, self.config.model.dtype)

    @property
    def _training_seconds(self) -> float:
        """Seconds of training on all ranks: of the fastest colocated layout, else of its operations alone."""
        if self.colocated is None:
            return self._operations()
        phases = self.colocated.step.phases
        return sum(phase.seconds for phase in phases if phase.name not in ("weight sync", "rollout"))

    def _operations(self) -> float:
        machine = MachineSpeed(self.gpu, self.efficiency, self.config.resources.ranks_per_node)
        engines = Engines(self.shape, self.config.rollout, machine, self.config.world_size, self.config.model.dtype)
        of_token, of_pair = engines.terms
        work = step_workload(self.config)
        return _PASSES * machine.compute(work.tokens * (of_token + of_pair * work.pairs)) / self.config.world_size
