"""Shortages of a planned run, and changes of keys with which it fits, cheapest first, each tried on the prediction."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ValidationError

from rlhpc.config.schema import RunConfig
from rlhpc.config.training import OptimizerSection, ParallelSection
from rlhpc.core.errors import UserError
from rlhpc.models import ModelDescription, ModelShape
from rlhpc.plan.checks.backend import model_layout
from rlhpc.plan.checks.limits import cache_key, cache_remedy, holds_sequence
from rlhpc.plan.checks.parallelism import check_engine, misfits
from rlhpc.plan.estimates.hardware import Gpu, Reserves, cpu_memory_limit
from rlhpc.plan.estimates.memory import GIB, MemoryPlan, engine_memory, predict_memory, sequence_tokens
from rlhpc.sharding.engine_shards import fits_nodes
from rlhpc.sharding.layout import ParallelLayout, make_layout
from rlhpc.sharding.placement import Backend, backend_for, engine_ranks, training_ranks


@dataclass(frozen=True)
class Shortage:
    """``what``: a phase, "KV cache" or "CPU memory". ``needed`` and ``limit`` in bytes; of a cache in tokens."""

    what: str
    needed: float
    limit: float
    where: str = ""  # the key that sets the limit
    remedy: str = ""

    @property
    def text(self) -> str:
        """In a few words, for a table."""
        if self.what == "KV cache":
            return f"KV cache: {self.limit:,.0f} of {self.needed:,.0f} tokens"
        return f"{self.what}: {self.needed / GIB:,.1f} of {self.limit / GIB:,.1f} GiB"


def shortages(config: RunConfig, shape: ModelDescription, memory: MemoryPlan, gpu: Gpu | None) -> list[Shortage]:
    """Returns what the run lacks on this GPU; without one, only what the config itself limits."""
    found = []
    if gpu is not None:
        size = gpu.memory_bytes
        found += [Shortage(phase.name, phase.total, size) for phase in memory.phases if phase.total > size]
    gib = gpu.memory_gib if gpu is not None else None
    if not holds_sequence(config, shape, gib):
        engine = engine_memory(config, shape, None if gib is None else int(gib * GIB))
        where, remedy = f"rollout.{cache_key(config.rollout)}", cache_remedy(config, shape, gib)
        found.append(Shortage("KV cache", sequence_tokens(config), max(0, engine.tokens), where, remedy))
    limit = cpu_memory_limit(config, gpu)
    if limit is not None and memory.cpu.node > limit[1]:
        found.append(Shortage("CPU memory", memory.cpu.node, limit[1], limit[0]))
    return found


Change = tuple[str, Any]  # dotted key and new value


@dataclass(frozen=True)
class Remedy:
    """Keys to change, and the resulting plan."""

    changes: tuple[Change, ...]
    plan: MemoryPlan
    holds_sequence: bool  # in the KV cache

    @property
    def fits(self) -> bool:
        """True if all phases fit, and a sequence into the KV cache."""
        return self.plan.first_too_large is None and self.holds_sequence

    @property
    def text(self) -> str:
        """The changes as command-line overrides."""
        return " ".join(
            f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in self.changes
        )


def find_remedies(
    config: RunConfig, shape: ModelDescription, layout: ParallelLayout, plan: MemoryPlan, count: int = 3
) -> list[Remedy]:
    """Returns at most ``count`` remedies, cheapest in time first: single changes or combinations that make all phases
    fit; if there are fewer, changes that make the first phase fit that does not.

    Empty for a plan that fits, or without a known GPU.
    """
    if plan.first_too_large is None or plan.gpu_bytes is None:
        return []
    trial = _Trial(config, shape, plan.gpu_bytes / 2**30, plan.reserves)
    whole: list[Remedy] = []
    partly: list[Remedy] = []
    usable = []
    for change in _ladder(config, layout, backend_for(config, shape)):
        alone = trial([change])
        if alone is None:
            continue
        usable.append(change)
        known = {remedy.changes[0][0] for remedy in (*whole, *partly)}
        if change[0] not in known and alone.holds_sequence and _helps(alone.plan, plan):
            (whole if alone.fits else partly).append(alone)
        if len(whole) == count:
            return whole
    together = [change for change in usable if change[0] not in {remedy.changes[0][0] for remedy in whole}]
    while len(whole) < count and (several := _several(trial, together)) is not None:
        whole.append(several)
        dearest = several.changes[-1][0]
        together = [change for change in together if change[0] != dearest]
    return [*whole, *partly][:count]


def _several(trial: _Trial, ladder: Sequence[Change]) -> Remedy | None:
    """Returns a minimal combination of changes that makes all phases fit, from the beginning of the ladder."""
    ladder = trial.compatible(ladder)
    low, high = 1, len(ladder)
    if not trial.enough(ladder):
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if trial.enough(ladder[:middle]) else (middle + 1, high)
    needed, before = dict(ladder[:high]), 0  # the last value of each key
    while len(needed) != before:  # a key may be needed only for one that is left out later
        before = len(needed)
        for key in reversed(list(needed)):
            less = {name: value for name, value in needed.items() if name != key}
            if trial.enough(list(less.items())):
                needed = less
    smallest: dict[str, Any] = {}
    for key, value in ladder[:high]:
        if key in needed and key not in smallest and trial.enough(list({**needed, **smallest, key: value}.items())):
            smallest[key] = value
    needed |= smallest
    return trial(list(needed.items()))


def _helps(tried: MemoryPlan, plan: MemoryPlan) -> bool:
    """True if the first phase that did not fit does now, and all phases before it still do."""
    order = [phase.name for phase in plan.phases]
    first, before = tried.first_too_large, plan.first_too_large
    return before is not None and (first is None or order.index(first.name) > order.index(before.name))


def changed_config(config: RunConfig, changes: Mapping[str, Any]) -> RunConfig:
    """Returns the config with ``changes`` applied."""
    for key, value in changes.items():
        config = _changed(config, key.split("."), value)
    return config


def _changed(section: Any, names: list[str], value: Any) -> Any:
    assert isinstance(section, BaseModel)
    own = value if len(names) == 1 else _changed(getattr(section, names[0]), names[1:], value)
    return section.model_copy(update={names[0]: own})


@dataclass(frozen=True)
class _Trial:
    """Tries changes of a configuration on a GPU of ``gib`` GiB."""

    config: RunConfig
    shape: ModelDescription
    gib: float
    reserves: Reserves

    def __call__(self, changes: Sequence[Change]) -> Remedy | None:
        """Returns None if the changed config cannot run."""
        config = changed_config(self.config, dict(changes))
        layout = self._layout(config)
        if layout is not None:
            with suppress(UserError):  # from a critic's or reward model's own layout
                plan = predict_memory(config, self.shape, layout, self.gib, self.reserves)
                return Remedy(tuple(changes), plan, holds_sequence(config, self.shape, self.gib))
        return None

    def _layout(self, config: RunConfig) -> ParallelLayout | None:
        """Returns None if the layout does not fit model, ranks, nodes or batches."""
        with suppress(UserError, ValidationError):
            generating = engine_ranks(config)
            training = training_ranks(config, config.world_size)
            layout = self._fitting(config.actor.parallel, training)
            if layout is None:
                return None
            if (generating or training) % config.rollout.tp:
                return None
            if config.placement == "lend" and training % config.rollout.tp:
                return None
            if not fits_nodes(config.rollout.tp, config.resources.ranks_per_node):
                return None
            samples = config.train.prompts_per_step * config.rollout.samples_per_prompt
            if config.train.steps and samples // config.train.minibatches < layout.dp:
                return None
            check_engine(self.shape, config.rollout)
            return layout
        return None

    def _fitting(self, parallel: ParallelSection, ranks: int) -> ParallelLayout | None:
        """Returns None if the layout does not fit the model. Raises UserError if it does not fit the ranks."""
        if backend_for(self.config, self.shape) == "fsdp":
            return model_layout("fsdp", parallel, ranks, self.shape)
        assert isinstance(self.shape, ModelShape), "megatron trains known families"
        layout = make_layout(parallel, ranks)
        return None if any(misfits(self.shape, layout, parallel)) else layout

    def compatible(self, changes: Sequence[Change]) -> list[Change]:
        """Returns the changes without those that cannot run together with earlier ones."""
        usable: list[Change] = []
        for change in changes:
            if self._layout(changed_config(self.config, dict([*usable, change]))) is not None:
                usable.append(change)
        return usable

    def enough(self, changes: Sequence[Change]) -> bool:
        """True if the changes make all phases fit."""
        remedy = self(list(dict(changes).items()))
        return remedy is not None and remedy.fits


def _ladder(config: RunConfig, layout: ParallelLayout, backend: Backend) -> Iterator[Change]:
    """Yields changes from cheapest to most expensive: offload, smaller batches, recomputation, CPU optimizer, layout,
    nodes."""
    memory, train, rollout = config.actor.memory, config.train, config.rollout
    for kind in ("gradients", "optimizer", "parameters") if backend == "megatron" else ("optimizer", "parameters"):
        if not (getattr(memory.offload, kind) or memory.cpu_offload):
            yield f"actor.memory.offload.{kind}", True
    if not config.reference.memory.offload:
        yield "reference.memory.offload", True
    if rollout.kv_cache_gib is None:
        for fraction in (0.9, 0.8, 0.7) if config.placement == "separate" else (0.5, 0.4, 0.3):
            if fraction < rollout.gpu_memory_utilization:
                yield "rollout.gpu_memory_utilization", fraction
    least = -(-sequence_tokens(config) // layout.cp)
    tokens = train.tokens_per_microbatch
    while tokens > least:
        tokens = max(tokens // 2, least)
        yield "train.tokens_per_microbatch", tokens
    if backend == "fsdp":
        yield from _gathering(config)
    if memory.recompute == "none":
        yield "actor.memory.recompute", "selective"
    if memory.recompute != "full":
        yield "actor.memory.recompute", "full"
    if not memory.offload_activations:  # has an effect with full recomputation alone
        yield "actor.memory.offload_activations", True
    if backend == "megatron":
        yield from _on_cpu(config.actor.optimizer)
    axes = ("tp", "ep", "pp", "cp") if backend == "megatron" else ("cp",)
    for key in ("rollout.tp", *(f"actor.parallel.{axis}" for axis in axes)):
        size: int = operator.attrgetter(key)(config)
        for factor in (2, 4):
            yield key, size * factor
    if isinstance(config.slurm.nodes, int):
        for factor in (2, 4):
            yield "slurm.nodes", config.slurm.nodes * factor


def _gathering(config: RunConfig) -> Iterator[Change]:
    """Yields changes of what FSDP2 gathers and keeps whole, cheapest first; auto keeps nothing that does not fit."""
    memory = config.actor.memory
    if memory.accumulation == "keep":
        yield "actor.memory.accumulation", "reduce"
    if not memory.reshard_after_forward:
        yield "actor.memory.reshard_after_forward", True
    if config.actor.parallel.dp_replicate > 1:
        yield "actor.parallel.dp_replicate", 1


def _on_cpu(optimizer: OptimizerSection) -> Iterator[Change]:
    for share in (0.5, 1.0):
        if optimizer.function is None and share > optimizer.optimizer_offload_fraction:
            yield "actor.optimizer.optimizer_offload_fraction", share
