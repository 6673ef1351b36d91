"""Searches the fastest predicted layout, recomputation, offload, microbatch and engine size within memory."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from math import gcd, inf
from typing import Any

from rlhpc.checkpoint.formats.described import resolve_value_model
from rlhpc.config.algorithm import WITH_CRITIC
from rlhpc.config.schema import RunConfig
from rlhpc.config.site import EfficiencySection
from rlhpc.config.training import FrozenMemorySection, OffloadSection
from rlhpc.core.errors import DoesNotFitError, UserError
from rlhpc.models import ModelDescription
from rlhpc.plan.checks.backend import layout_text
from rlhpc.plan.checks.limits import cache_key, cache_remedy, holds_sequence
from rlhpc.plan.checks.parallelism import check_engine
from rlhpc.plan.estimates.hardware import Gpu, cpu_memory_limit
from rlhpc.plan.estimates.memory import USABLE, MemoryPlan, predict_memory
from rlhpc.plan.estimates.roofline import PhaseTime
from rlhpc.plan.estimates.step_time import StepTime, predict_rollout, predict_step
from rlhpc.plan.estimates.train_time import stage_parameters
from rlhpc.plan.layouts import LAYOUT_KEYS, legal_layouts, parallel_of
from rlhpc.plan.remedies import Shortage, changed_config, shortages
from rlhpc.sharding.engine_shards import fits_nodes
from rlhpc.sharding.layout import ParallelLayout, divisors, make_layout
from rlhpc.sharding.placement import Backend, backend_for, engine_ranks, generating_ranks, ranks_with

_MICROBATCHES = (1, 2, 4)  # in longest sequences
_LEVELS = ("none", "selective", "full")


@dataclass(frozen=True)
class Offload:
    """State that leaves the GPU while unused."""

    actor: OffloadSection
    reference: FrozenMemorySection


@dataclass(frozen=True)
class Variant:
    """``size``: tokens of a microbatch. ``fraction``: of AdamW on the CPU. The last two are FSDP2's."""

    size: int
    fraction: float
    level: str
    offload: Offload
    accumulation: str = "auto"
    reshards: bool = True


NOTHING = Offload(OffloadSection(), FrozenMemorySection())


def offload_of(config: RunConfig) -> Offload:
    """Returns the offload of a config."""
    return Offload(config.actor.memory.offload, config.reference.memory)


def variants(config: RunConfig, layout: ParallelLayout, shape: ModelDescription, gpu: Gpu) -> Iterator[RunConfig]:
    """Yields configs by recomputation, offload and microbatch, except those whose weights alone are too large."""
    backend = backend_for(config, shape)
    parts = max(stage_parameters(shape, layout), key=lambda part: part.count)
    owned = parts.dense / (layout.dp * layout.cp) + parts.experts / layout.edp
    for found in _all(config, layout, backend):
        if backend == "fsdp" or 6 * parts.count + 12 * (1 - found.fraction) * owned <= gpu.memory_bytes:  # in updates
            yield varied(config, layout, found)


def fastest_variants(config: RunConfig, layout: ParallelLayout, shape: ModelDescription) -> Iterator[RunConfig]:
    """Yields the fastest config with each microbatch size."""
    backend = backend_for(config, shape)
    for size in _sizes(config, layout):
        variant = Variant(size, min(_fractions(config, backend)), "none", NOTHING)
        if backend == "fsdp":
            variant = replace(variant, accumulation="keep", reshards=False)
        yield varied(config, layout, variant)


def leanest(config: RunConfig, layout: ParallelLayout, shape: ModelDescription) -> RunConfig:
    """Returns the config that needs least memory."""
    backend = backend_for(config, shape)
    usual = Variant(min(_sizes(config, layout)), max(_fractions(config, backend)), "full", _offloads(config)[0])
    return varied(config, layout, replace(usual, accumulation="reduce") if backend == "fsdp" else usual)


def varied(config: RunConfig, layout: ParallelLayout, variant: Variant) -> RunConfig:
    """Returns the config with the layout and the variant's settings."""
    actor = config.actor
    memory = {
        "recompute": variant.level,
        "offload_activations": actor.memory.offload_activations and variant.level == "full",
        "offload": variant.offload.actor,
        "accumulation": variant.accumulation,
        "reshard_after_forward": variant.reshards,
    }
    changed = {
        "parallel": parallel_of(actor.parallel, layout),
        "optimizer": actor.optimizer.model_copy(update={"optimizer_offload_fraction": variant.fraction}),
        "memory": actor.memory.model_copy(update=memory),
    }
    return config.model_copy(
        update={
            "actor": actor.model_copy(update=changed),
            "reference": config.reference.model_copy(update={"memory": variant.offload.reference}),
            "train": config.train.model_copy(update={"tokens_per_microbatch": variant.size}),
        }
    )


def _all(config: RunConfig, layout: ParallelLayout, backend: Backend) -> Iterator[Variant]:
    own = [("auto", True)] if backend == "megatron" else list(product(("keep", "reduce"), (False, True)))
    for size, fraction, level, offload, (accumulation, reshards) in product(
        _sizes(config, layout), _fractions(config, backend), _LEVELS, _offloads(config), own
    ):
        yield Variant(size, fraction, level, offload, accumulation, reshards)


def _sizes(config: RunConfig, layout: ParallelLayout) -> list[int]:
    """Returns microbatch sizes: one, two and four longest sequences, and the configured size."""
    longest = -(-(config.data.max_prompt_tokens + config.rollout.max_response_tokens) // layout.cp)
    asked = config.train.tokens_per_microbatch
    return sorted({longest * count for count in _MICROBATCHES} | ({asked} if asked >= longest else set()))


def _fractions(config: RunConfig, backend: Backend) -> list[float]:
    if backend == "fsdp":  # updates on the GPU alone
        return [0.0]
    optimizer = config.actor.optimizer
    return sorted({optimizer.optimizer_offload_fraction} | ({0.0, 1.0} if optimizer.function is None else set()))


def _offloads(config: RunConfig) -> list[Offload]:
    """The one that leaves least on the GPU first."""
    if config.actor.memory.cpu_offload:  # there is nothing of the actor on it
        return [replace(offload_of(config), reference=FrozenMemorySection(offload=True)), offload_of(config)]
    names = ["gradients", "optimizer"] + ([] if config.reshard.share_weights else ["parameters"])
    most = Offload(OffloadSection(**dict.fromkeys(names, True)), FrozenMemorySection(offload=True))
    return list(dict.fromkeys([most, offload_of(config), NOTHING]))


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
        """Keys to write into the configuration."""
        config, asked = self.config, self.asked.actor.parallel
        parallel = {
            name: getattr(config.actor.parallel, name)
            for name in (*LAYOUT_KEYS, "dp_replicate")
            if getattr(config.actor.parallel, name) not in (1, None) or getattr(asked, name) not in (1, None)
        }
        memory: dict[str, Any] = {"recompute": config.actor.memory.recompute}
        for name in ("offload_activations", "reshard_after_forward", "accumulation"):
            if getattr(config.actor.memory, name) != getattr(self.asked.actor.memory, name):
                memory[name] = getattr(config.actor.memory, name)
        train: dict[str, Any] = {"tokens_per_microbatch": config.train.tokens_per_microbatch}
        if config.train.backend != self.asked.train.backend:
            train["backend"] = config.train.backend
        if config.actor.memory.recompute == "full" and {
            config.actor.memory.recompute_layers,
            self.asked.actor.memory.recompute_layers,
        } != {1}:
            memory["recompute_layers"] = config.actor.memory.recompute_layers
        memory["offload"] = config.actor.memory.offload.model_dump()
        rollout: dict[str, Any] = {"tp": config.rollout.tp}
        placement: dict[str, Any] = {}
        if config.placement != "colocated":
            ahead = {"max_staleness": config.asynchrony.max_staleness}
            placement = {"placement": config.placement, "asynchrony": ahead}
            rollout |= {key: getattr(config.rollout, key) for key in ("ranks", "nodes") if getattr(config.rollout, key)}
        if config.rollout.gpu_memory_utilization != self.asked.rollout.gpu_memory_utilization:
            rollout["gpu_memory_utilization"] = config.rollout.gpu_memory_utilization
        return {
            **placement,
            "actor": {
                "parallel": parallel or {"tp" if self.backend == "megatron" else "dp_replicate": 1},
                "optimizer": {"optimizer_offload_fraction": config.actor.optimizer.optimizer_offload_fraction},
                "memory": memory,
            },
            "reference": {"memory": config.reference.memory.model_dump()},
            "rollout": rollout,
            "train": train,
        }


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
            remedy=cache_remedy(_with_engine(config, 1), shape, gpu.memory_gib),
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


@dataclass(frozen=True)
class _Search:
    config: RunConfig
    shape: ModelDescription
    gpu: Gpu
    efficiency: EfficiencySection
    generating: Sequence[tuple[PhaseTime, int]]

    def bound(self, layout: ParallelLayout) -> float:
        """Returns a lower bound of the seconds of the layout's variants."""
        tried = list(fastest_variants(self.config, layout, self.shape))
        if engine_ranks(self.config) is None:
            return min(self._step(each, layout, self.generating[0][0]).seconds for each in tried)
        with_engines = [(_with_engine(each, tp), phase) for each in tried for phase, tp in self.generating]
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
            if _key(layout) in best:
                continue
            looked_at += 1
            if tried is None:
                for seconds, variant in self._variants(layout, whole_run=whole_run):
                    heapq.heappush(heap, (seconds, len(bounds) + timed, layout, variant))
                    timed += 1
            elif (regrouped := self._fitting(tried, layout, whole_run=whole_run)) is not None:
                changed, memory = regrouped
                phase = next(phase for phase, tp in self.generating if tp == tried.rollout.tp)
                step = self._step(changed, layout, phase)
                lacks = tuple(shortages(changed, self.shape, memory, self.gpu))
                backend = backend_for(changed, self.shape)
                text = layout_text(backend, changed.actor.parallel, layout.world_size, self.shape)
                best[_key(layout)] = Candidate(self.config, changed, layout, step, memory, backend, text, lacks)
        return SearchResult(tuple(best.values()), len(bounds), timed, looked_at)

    def _variants(self, layout: ParallelLayout, *, whole_run: bool) -> Iterator[tuple[float, RunConfig]]:
        """Yields (seconds, variant); none if not even the leanest fits."""
        fits: dict[tuple[float, Offload], bool] = {}
        for phase, tp in self.generating:
            # CPU memory is not checked: the leanest variant on the GPU needs most of it.
            least = _with_engine(leanest(self.config, layout, self.shape), tp)
            if self._fitting(least, layout, whole_run=whole_run) is None:
                continue
            for changed in variants(self.config, layout, self.shape, self.gpu):
                variant = _with_engine(changed, tp)
                used = changed.actor.optimizer.optimizer_offload_fraction, offload_of(changed)
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


def _key(layout: ParallelLayout) -> tuple[int, ...]:
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
    config: RunConfig, shape: ModelDescription, ranks: int, gpu: Gpu, efficiency: EfficiencySection
) -> list[tuple[PhaseTime, int]]:
    """Returns the fastest engine sizes; only those within a node if there are any."""
    found = []
    generating = generating_ranks(config, ranks)
    for tp in divisors(generating):
        if not fits_nodes(tp, config.resources.ranks_per_node) or (config.placement == "lend" and ranks % tp):
            continue
        tried = _with_engine(config, tp)
        with suppress(UserError):
            check_engine(shape, tried.rollout)
            phase = predict_rollout(tried, shape, generating, gpu, efficiency)
            if phase is not None and holds_sequence(tried, shape, gpu.memory_gib):
                found.append((phase, tp))
    on_node = [each for each in found if config.resources.ranks_per_node % each[1] == 0]
    return sorted(on_node or found, key=lambda each: each[0].seconds)[:_ENGINES]


def _with_engine(config: RunConfig, tp: int) -> RunConfig:
    return config.model_copy(update={"rollout": config.rollout.model_copy(update={"tp": tp})})
