"""Searches the fastest predicted layout, recomputation, offload, microbatch and engine size within memory."""

from __future__ import annotations

import heapq
from collections import ChainMap
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from math import gcd, inf
from typing import Any

from rlhpc.checkpoint.formats.described import resolve_value_model
from rlhpc.config.algorithm import WITH_CRITIC
from rlhpc.config.rollout import RolloutSection
from rlhpc.config.schema import RunConfig
from rlhpc.config.site import EfficiencySection
from rlhpc.config.training import FrozenMemorySection, OffloadSection
from rlhpc.core.errors import DoesNotFitError, UserError
from rlhpc.models import ModelDescription
from rlhpc.plan.checks.backend import layout_text
from rlhpc.plan.checks.limits import cache_key, cache_remedy, holds_sequence
from rlhpc.plan.checks.parallelism import check_engine, parallel_of
from rlhpc.plan.estimates.hardware import Gpu, cpu_memory_limit
from rlhpc.plan.estimates.memory import USABLE, MemoryPlan, predict_memory
from rlhpc.plan.estimates.roofline import PhaseTime
from rlhpc.plan.estimates.step_time import StepTime, predict_rollout, predict_step
from rlhpc.plan.estimates.train_time import stage_parameters
from rlhpc.plan.layouts import legal_layouts
from rlhpc.plan.scenario import Shortage, changed_config, differences, shortages
from rlhpc.sharding.engine_shards import fits_nodes
from rlhpc.sharding.layout import ParallelLayout, divisors, make_layout
from rlhpc.sharding.placement import Backend, backend_for, engine_ranks, generating_ranks, ranks_with

_MICROBATCHES = (1, 2, 4)  # in longest sequences
_LEVELS = (("none", False), ("selective", False), ("full", False), ("full", True))  # and activations in CPU memory


Setting = dict[str, Any]  # by dotted keys


def variants(
    config: RunConfig, layout: ParallelLayout, shape: ModelDescription, gpu: Gpu, *, away: bool = False
) -> Iterator[RunConfig]:
    """Yields configs by recomputation, offload and microbatch, except those whose weights alone are too large.

    ``away``: also with activations in CPU memory where the config has them on the GPU.
    """
    backend, laid_out = backend_for(config, shape), _laid_out(config, layout)
    parts = max(stage_parameters(shape, layout), key=lambda part: part.count)
    owned = parts.dense / (layout.dp * layout.cp) + parts.experts / layout.edp
    for each in product(*_choices(config, layout, backend, away=away)):
        found = changed_config(laid_out, ChainMap(*each))
        on_gpu = 1 - found.actor.optimizer.optimizer_offload_fraction
        if backend == "fsdp" or 6 * parts.count + 12 * on_gpu * owned <= gpu.memory_bytes:  # in updates
            yield found


def fastest_variants(config: RunConfig, layout: ParallelLayout, shape: ModelDescription) -> Iterator[RunConfig]:
    """Yields the fastest config with each microbatch size."""
    sizes, fractions, levels, offloads, own = _choices(config, layout, backend_for(config, shape))
    for size in sizes:
        each = size, fractions[0], levels[0], offloads[-1], own[0]
        yield changed_config(_laid_out(config, layout), ChainMap(*each))


def leanest(config: RunConfig, layout: ParallelLayout, shape: ModelDescription, *, away: bool = False) -> RunConfig:
    """Returns the one of ``variants`` that needs least memory."""
    sizes, fractions, levels, offloads, own = _choices(config, layout, backend_for(config, shape), away=away)
    each = sizes[0], fractions[-1], levels[-1], offloads[0], own[-1]
    return changed_config(_laid_out(config, layout), ChainMap(*each))


def _laid_out(config: RunConfig, layout: ParallelLayout) -> RunConfig:
    return changed_config(config, {"actor.parallel": parallel_of(config.actor.parallel, layout)})


def _choices(
    config: RunConfig, layout: ParallelLayout, backend: Backend, *, away: bool = False
) -> tuple[list[Setting], ...]:
    """Returns the settings of microbatches, AdamW on the CPU, recomputation, offload, and of what FSDP2 gathers. From
    little to much memory: the first and the fourth; the others from much to little."""
    memory, optimizer, asked = config.actor.memory, config.actor.optimizer, config.train.tokens_per_microbatch
    longest = -(-(config.data.max_prompt_tokens + config.rollout.max_response_tokens) // layout.cp)
    sizes = {longest * count for count in _MICROBATCHES} | ({asked} if asked >= longest else set())
    fractions = {optimizer.optimizer_offload_fraction} | ({0.0, 1.0} if optimizer.function is None else set())
    levels = [level for level in _LEVELS if level[0] != "full" or away or level[1] == memory.offload_activations]
    gathered = product(("keep", "reduce"), (False, True))
    return (
        [{"train.tokens_per_microbatch": size} for size in sorted(sizes)],
        [
            {"actor.optimizer.optimizer_offload_fraction": fraction}
            for fraction in sorted(fractions if backend == "megatron" else {0.0})  # with FSDP2 on the GPU alone
        ],
        [{"actor.memory.recompute": level, "actor.memory.offload_activations": on_cpu} for level, on_cpu in levels],
        _offloads(config),
        [{"actor.memory.accumulation": sums, "actor.memory.reshard_after_forward": again} for sums, again in gathered]
        if backend == "fsdp"
        else [{}],
    )


def _offloads(config: RunConfig) -> list[Setting]:
    own, frozen = (config.actor.memory.offload, config.reference.memory), FrozenMemorySection(offload=True)
    names = ["gradients", "optimizer"] + ([] if config.reshard.share_weights else ["parameters"])
    most = OffloadSection(**dict.fromkeys(names, True)), frozen
    found = [most, own, (OffloadSection(), FrozenMemorySection())]
    if config.actor.memory.cpu_offload:  # there is nothing of the actor on the GPU
        found = [(own[0], frozen), own]
    return [{"actor.memory.offload": actor, "reference.memory": reference} for actor, reference in dict.fromkeys(found)]


_LESS = (0.9, 0.8, 0.7, 0.5, 0.4, 0.3)  # of a GPU for an engine: by itself, or beside a trainer
_ENGINES = 3  # number of fastest engine sizes tried with each layout
_AROUND = ("load", "save")  # phases outside of steps
_GROUPS = (1, 2, 3, 4)  # layers recomputed together: larger groups need more memory than they save
_PASSES = "forward and backward"  # phases whose memory depends on the size of these groups


@dataclass(frozen=True)
class Candidate:
    """A configuration that fits model and batches; ``config`` is ``asked``, changed. ``text``: its layout in words."""

    asked: RunConfig
    config: RunConfig
    layout: ParallelLayout
    step: StepTime
    memory: MemoryPlan
    backend: Backend = "megatron"
    text: str = ""
    lacks: tuple[Shortage, ...] = ()  # outside of steps, if nothing fits there

    @property
    def fragment(self) -> dict[str, Any]:
        """Keys to write into the configuration that was asked for: those with another value here."""
        found: dict[str, Any] = {}
        for key, value in differences(self.asked, self.config):
            *sections, name = key.split(".")
            section = found
            for part in sections:
                section = section.setdefault(part, {})
            section[name] = value
        return found


@dataclass(frozen=True)
class SearchResult:
    """The fastest configurations within memory, one per layout, best first."""

    best: tuple[Candidate, ...]
    layouts: int  # that fit model, ranks and batches
    timed: int  # variants with predicted time
    looked_at: int  # layouts and variants with predicted memory


def search(
    config: RunConfig, shape: ModelDescription, ranks: int, gpu: Gpu, efficiency: EfficiencySection, count: int = 5
) -> SearchResult:
    """Returns the ``count`` fastest layouts for ``ranks`` ranks that train, with the recomputation and offload that
    make them fit.

    If none fits in all phases, those that fit in the phases of a step. Best-first: a layout's time without
    recomputation and offload is a lower bound for its variants, so that only layouts with a bound below the best
    results are expanded. Layouts that no variant makes fit are skipped.
    """
    generating = _engines(config, shape, ranks, gpu, efficiency)
    if not generating:
        raise DoesNotFitError(
            "no engine size leaves room for a whole sequence in the KV cache",
            where=f"rollout.{cache_key(config.rollout)}",
            remedy=cache_remedy(changed_config(config, {"rollout.tp": 1}), shape, gpu.memory_gib),
        )
    searching = _Search(config, shape, gpu, efficiency, generating)
    bounds = [
        (searching.bound(layout), number, layout)
        for number, layout in enumerate(legal_layouts(config, shape, ranks, gpu))
    ]
    for whole_run in (True, False):
        found = searching.run(bounds, count, whole_run=whole_run)
        if found.best:
            break
    return found


def fastest(
    config: RunConfig,
    shape: ModelDescription,
    layouts: Sequence[ParallelLayout],
    gpu: Gpu,
    efficiency: EfficiencySection,
    below: float = inf,
) -> Candidate | None:
    """Returns the fastest of ``layouts`` of the same ranks that fits in all phases, if a step takes less than ``below``
    seconds; None without one."""
    generating = _engines(config, shape, layouts[0].world_size, gpu, efficiency) if layouts else []
    if not generating:
        return None
    searching = _Search(config, shape, gpu, efficiency, generating)
    able = [each for each in ((searching.bound(layout), layout) for layout in layouts) if each[0] < below]
    found = [(bound, number, layout) for number, (bound, layout) in enumerate(able)]
    return next(iter(searching.run(found, 1, whole_run=True, below=below).best), None)


def fastest_of_each(
    config: RunConfig,
    shape: ModelDescription,
    layouts: Sequence[ParallelLayout],
    gpu: Gpu,
    efficiency: EfficiencySection,
) -> Iterator[Candidate]:
    """Yields the fastest settings of each of ``layouts`` of the same ranks that has any that fit in all phases. Also
    tried are less memory for engines and activations in CPU memory, which a search leaves as configured."""
    generating = _engines(config, shape, layouts[0].world_size, gpu, efficiency, _LESS) if layouts else []
    searching = _Search(config, shape, gpu, efficiency, generating, away=True)
    for layout in layouts:
        yield from searching.run([(0.0, 0, layout)], 1, whole_run=True).best


@dataclass(frozen=True)
class _Search:
    """``generating``: engines, and their time for a step's responses. ``away``: see ``variants``."""

    config: RunConfig
    shape: ModelDescription
    gpu: Gpu
    efficiency: EfficiencySection
    generating: Sequence[tuple[PhaseTime, RolloutSection]]
    away: bool = False

    def bound(self, layout: ParallelLayout) -> float:
        """Returns a lower bound of the seconds of the layout's variants."""
        tried = list(fastest_variants(self.config, layout, self.shape))
        if engine_ranks(self.config) is None:
            return min(self._step(each, layout, self.generating[0][0]).seconds for each in tried)
        with_engines = [(_with_engine(each, engine), phase) for each in tried for phase, engine in self.generating]
        return min(self._step(each, layout, phase).seconds for each, phase in with_engines)

    def run(
        self,
        bounds: Sequence[tuple[float, int, ParallelLayout]],
        count: int,
        *,
        whole_run: bool,
        below: float = inf,
    ) -> SearchResult:
        """``whole_run``: loading and saving must fit too, not the phases of a step alone. ``below``: seconds that a
        step must not reach."""
        heap: list[tuple[float, int, ParallelLayout, RunConfig | None]] = [(*bound, None) for bound in bounds]
        heapq.heapify(heap)
        best: dict[tuple[int, ...], Candidate] = {}
        timed = looked_at = 0
        while heap and len(best) < count:
            seconds, _, layout, tried = heapq.heappop(heap)
            if seconds >= below:
                break
            if cut_of(layout) in best:
                continue
            looked_at += 1
            if tried is None:
                for seconds, variant in self._variants(layout, whole_run=whole_run):
                    heapq.heappush(heap, (seconds, len(bounds) + timed, layout, variant))
                    timed += 1
            elif (regrouped := self._fitting(tried, layout, whole_run=whole_run)) is not None:
                changed, memory = regrouped
                phase = next(phase for phase, engine in self.generating if engine == tried.rollout)
                step = self._step(changed, layout, phase)
                lacks = tuple(shortages(changed, self.shape, memory, self.gpu))
                backend = backend_for(changed, self.shape)
                text = layout_text(backend, changed.actor.parallel, layout.world_size, self.shape)
                best[cut_of(layout)] = Candidate(self.config, changed, layout, step, memory, backend, text, lacks)
        return SearchResult(tuple(best.values()), len(bounds), timed, looked_at)

    def _variants(self, layout: ParallelLayout, *, whole_run: bool) -> Iterator[tuple[float, RunConfig]]:
        """Yields (seconds, variant); none if not even the leanest fits."""
        fits: dict[object, bool] = {}
        for phase, engine in self.generating:
            # CPU memory is not checked: the leanest variant on the GPU needs most of it.
            least = _with_engine(leanest(self.config, layout, self.shape, away=self.away), engine)
            if self._fitting(least, layout, whole_run=whole_run) is None:
                continue
            for changed in variants(self.config, layout, self.shape, self.gpu, away=self.away):
                variant, memory = _with_engine(changed, engine), changed.actor.memory
                of_batch = changed.train.tokens_per_microbatch if memory.offload_activations else 0
                fraction = changed.actor.optimizer.optimizer_offload_fraction
                used = fraction, memory.offload, changed.reference.memory, of_batch
                if used not in fits:  # CPU memory depends on nothing else
                    fits[used] = self._fits_cpu_memory(variant, layout)
                if not fits[used]:
                    continue
                yield self._step(variant, layout, phase).seconds, variant

    def _fits_cpu_memory(self, tried: RunConfig, layout: ParallelLayout) -> bool:
        limit = cpu_memory_limit(self.config, self.gpu)
        if limit is None:
            return True
        return predict_memory(tried, self.shape, layout, self.gpu.memory_gib).cpu.node <= limit[1]

    def _step(self, tried: RunConfig, layout: ParallelLayout, phase: PhaseTime) -> StepTime:
        return predict_step(tried, self.shape, layout, self.gpu, self.efficiency, phase)

    def _fitting(
        self, tried: RunConfig, layout: ParallelLayout, *, whole_run: bool
    ) -> tuple[RunConfig, MemoryPlan] | None:
        """Returns the variant with the smallest recomputed groups that fits the GPU; all sizes take equally long."""
        grouped = tried.actor.memory.recompute == "full" and backend_for(tried, self.shape) == "megatron"
        groups = _groups(tried, self.shape, layout) if grouped else (None,)
        for size in groups:
            changed = tried if size is None else _grouped(tried, size)
            memory = predict_memory(changed, self.shape, layout, self.gpu.memory_gib, self.gpu.reserves)
            too_large = self._too_large(memory, whole_run=whole_run)
            if not too_large:
                return changed, memory
            if not all(name.endswith(_PASSES) for name in too_large):
                return None
        return None

    def _too_large(self, memory: MemoryPlan, *, whole_run: bool) -> list[str]:
        """Returns the phases that need more than the usable part of the GPU."""
        phases = [phase for phase in memory.phases if whole_run or phase.name not in _AROUND]
        return [phase.name for phase in phases if phase.total > USABLE * self.gpu.memory_bytes]


def cut_of(layout: ParallelLayout) -> tuple[int, ...]:
    """Returns the sizes that cut the model."""
    return tuple(layout.size(axis) for axis in ("tp", "pp", "cp", "ep", "etp"))


def _groups(config: RunConfig, shape: ModelDescription, layout: ParallelLayout) -> list[int]:
    """Returns sizes of recomputed groups that divide the stages of actor and critic: small ones and the configured."""
    lengths = {layers // (layout.vpp or 1) for layers in layout.stage_layers(shape.num_layers)}
    critic = config.critic
    if config.algorithm.name in WITH_CRITIC and critic.memory is None:
        other = make_layout(critic.parallel or config.actor.parallel, ranks_with(config, critic.on, layout.world_size))
        layers = resolve_value_model(config, critic.path).num_layers if critic.path is not None else shape.num_layers
        lengths |= {count // (other.vpp or 1) for count in other.stage_layers(layers)}
    return [size for size in sorted({*_GROUPS, config.actor.memory.recompute_layers}) if gcd(*lengths) % size == 0]


def _grouped(config: RunConfig, size: int) -> RunConfig:
    return changed_config(config, {"actor.memory.recompute_layers": size})


def _engines(
    config: RunConfig,
    shape: ModelDescription,
    ranks: int,
    gpu: Gpu,
    efficiency: EfficiencySection,
    shares: Sequence[float] = (),
) -> list[tuple[PhaseTime, RolloutSection]]:
    """Returns the fastest engine sizes; only those within a node if there are any. The one of the configured size, else
    the fastest, also with each of these smaller ``shares`` of a GPU."""
    generating, per_node = generating_ranks(config, ranks), config.resources.ranks_per_node

    def able(**changes: Any) -> Iterator[tuple[PhaseTime, RolloutSection]]:
        tried = _with_engine(config, config.rollout.model_copy(update=changes))
        with suppress(UserError):
            check_engine(shape, tried.rollout)
            phase = predict_rollout(tried, shape, generating, gpu, efficiency)
            if phase is not None and holds_sequence(tried, shape, gpu.memory_gib):
                yield phase, tried.rollout

    sizes = [tp for tp in divisors(generating) if fits_nodes(tp, per_node)]
    found = [one for tp in sizes if config.placement != "lend" or not ranks % tp for one in able(tp=tp)]
    on_node = [one for one in found if per_node % one[1].tp == 0]
    best = sorted(on_node or found, key=_seconds)[:_ENGINES]
    for _, engine in sorted(best, key=lambda one: one[1].tp != config.rollout.tp)[:1]:
        if engine.kv_cache_gib is None:
            less = [share for share in shares if share < engine.gpu_memory_utilization]
            best += [one for share in less for one in able(tp=engine.tp, gpu_memory_utilization=share)]
    return sorted(best, key=_seconds)


def _seconds(one: tuple[PhaseTime, RolloutSection]) -> float:
    return one[0].seconds


def _with_engine(config: RunConfig, engine: RolloutSection) -> RunConfig:
    return config.model_copy(update={"rollout": engine})
