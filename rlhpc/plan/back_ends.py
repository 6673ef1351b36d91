"""Searches of both training back ends on a number of GPUs, and of the fastest layout on each of several numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import gcd

from rlhpc.config.schema import RunConfig
from rlhpc.config.site import EfficiencySection
from rlhpc.config.training import ActorSection
from rlhpc.core.errors import DoesNotFitError, UserError
from rlhpc.models import ModelDescription, ModelShape
from rlhpc.plan.checks.backend import FSDP_KEYS, MEGATRON_KEYS, check_backend
from rlhpc.plan.estimates.hardware import Gpu, cpu_memory_limit
from rlhpc.plan.scenario import changed_config
from rlhpc.plan.search import Candidate, SearchResult, search
from rlhpc.sharding.layout import divisors
from rlhpc.sharding.placement import Backend, backend_for, engine_ranks, judge_ranks, training_ranks


@dataclass(frozen=True)
class OtherBackEnd:
    """The back end that is not the run's own: its fastest layout, or why it has none."""

    name: Backend
    best: Candidate | None = None
    reason: str = ""


def search_back_end(
    config: RunConfig, shape: ModelDescription, ranks: int, gpu: Gpu, efficiency: EfficiencySection, count: int = 5
) -> SearchResult:
    """Returns a search of the configured back end; with FSDP2 over numbers of copies of the weights, too."""
    if backend_for(config, shape) == "megatron":
        return search(config, shape, ranks, gpu, efficiency, count)
    found = [
        search(changed_config(config, {"actor.parallel.dp_replicate": copies}), shape, ranks, gpu, efficiency, count)
        for copies in _copies(config, ranks)
    ]
    every = [one for result in found for one in result.best]
    able = [one for one in every if not one.lacks] or every
    best = [replace(one, asked=config) for one in sorted(able, key=lambda one: one.step.seconds)]
    layouts, timed, looked_at = (sum(getattr(one, name) for one in found) for name in ("layouts", "timed", "looked_at"))
    return SearchResult(tuple(best[:count]), layouts, timed, looked_at)


def fitting_layouts(
    config: RunConfig, shape: ModelDescription, gpu: Gpu, efficiency: EfficiencySection, count: int = 5
) -> SearchResult:
    """The best layouts. Raises UserError if none fits."""
    ranks = training_ranks(config, config.world_size)
    found = search_back_end(config, shape, ranks, gpu, efficiency, count)
    if not found.layouts:
        raise UserError(
            f"no layout of {ranks:,} ranks suits model, batches and {gpu.name}",
            where="rlhpc plan search",
            remedy="take another number of nodes, or raise train.prompts_per_step",
        )
    if not found.best:
        limit = cpu_memory_limit(config, gpu)
        cpu = f" and {limit[1] / 2**30:,.0f} GiB of CPU memory per node ({limit[0]})" if limit else ""
        raise DoesNotFitError(
            f"none of {found.layouts:,} layouts fits into {gpu.memory_gib:g} GiB{cpu}",
            where="rlhpc plan search",
            remedy="use more or larger GPUs, or shorter sequences",
        )
    return found


def search_other_back_end(
    config: RunConfig, shape: ModelDescription, ranks: int, gpu: Gpu, efficiency: EfficiencySection
) -> OtherBackEnd:
    """Returns the fastest layout of the back end that is not configured."""
    other: Backend = "fsdp" if backend_for(config, shape) == "megatron" else "megatron"
    if other == "megatron" and not isinstance(shape, ModelShape):
        return OtherBackEnd(other, reason="the model is of no known family")
    try:
        tried = with_back_end(config, other)
        check_backend(tried, shape)
        found = search_back_end(tried, shape, ranks, gpu, efficiency, 1).best
    except UserError as error:
        return OtherBackEnd(other, reason=f"{error.where}: {error.message}")
    best = next((one for one in found if not one.lacks), None)
    if best is None:
        return OtherBackEnd(other, reason="no layout fits")
    return OtherBackEnd(other, replace(best, asked=config))


def with_back_end(config: RunConfig, backend: Backend) -> RunConfig:
    """Returns the config on a back end, without the layout and settings of the other one."""
    keys, usual = MEGATRON_KEYS if backend == "fsdp" else FSDP_KEYS, ActorSection()
    defaults = {f"actor.{part}.{key}": getattr(getattr(usual, part), key) for part in keys for key in keys[part]}
    changed = changed_config(config, {"train.backend": backend, **defaults})
    if config.critic.parallel is not None:
        changed = changed_config(changed, {"critic.parallel": None})
    if backend == "megatron" and config.train.compile == "blocks":
        changed = changed_config(changed, {"train.compile": "auto"})
    return changed


def _copies(config: RunConfig, ranks: int) -> list[int]:
    """Returns numbers of copies of the weights: each on whole nodes, and as configured."""
    nodes = max(1, ranks // config.resources.ranks_per_node)
    return sorted({1, config.actor.parallel.dp_replicate, *divisors(nodes)})


@dataclass(frozen=True)
class OnGpus:
    """The fastest layout on ``gpus`` GPUs, or why none fits."""

    gpus: int
    best: Candidate | None
    reason: str = ""

    @property
    def speed(self) -> float:
        """Tokens per second of one GPU; 0 if none fits."""
        return self.best.step.tokens_per_second / self.gpus if self.best is not None and not self.best.lacks else 0.0


def search_counts(
    config: RunConfig, shape: ModelDescription, gpu: Gpu, efficiency: EfficiencySection, counts: Sequence[int]
) -> Iterator[OnGpus]:
    """Yields a result for each number of GPUs, with the configured shares of ranks that generate and judge."""
    for gpus in counts:
        try:
            found = fitting_layouts(_sized(config, gpus), shape, gpu, efficiency, 1)
        except UserError as error:
            yield OnGpus(gpus, None, error.message)
        else:
            yield OnGpus(gpus, found.best[0], "; ".join(lack.text for lack in found.best[0].lacks))


def _sized(config: RunConfig, gpus: int) -> RunConfig:
    """The config on so many GPUs. Raises UserError if they are no whole nodes, or do not divide by the shares."""
    nodes, rest = divmod(gpus, config.resources.ranks_per_node)
    generates, judges = engine_ranks(config) or 0, judge_ranks(config)
    trains = training_ranks(config, config.world_size)
    common = gcd(trains, generates, judges)
    parts = (trains + generates + judges) // common
    if rest or not nodes:
        raise UserError(f"no whole nodes of {config.resources.ranks_per_node} GPUs")
    if not generates:
        return changed_config(config, {"slurm.nodes": nodes})
    if gpus % parts:
        raise UserError(f"the shares of ranks that train and that do not need a multiple of {parts} GPUs")
    split: dict[str, int | None] = {"rollout.ranks": gpus // parts * (generates // common), "rollout.nodes": None}
    if judges:
        split |= {"judges.ranks": gpus // parts * (judges // common), "judges.nodes": None}
    return changed_config(changed_config(config, {"slurm.nodes": nodes}), split)
