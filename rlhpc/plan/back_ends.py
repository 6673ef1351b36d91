"""Compares both training back ends for a model on a number of GPUs: the fastest layouts of each that fit."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from rlhpc.config.schema import RunConfig
from rlhpc.config.site import EfficiencySection
from rlhpc.core.errors import UserError
from rlhpc.models import ModelDescription, ModelShape
from rlhpc.plan.checks.backend import check_backend
from rlhpc.plan.estimates.hardware import Gpu
from rlhpc.plan.remedies import changed_config
from rlhpc.plan.search import Candidate, SearchResult, search
from rlhpc.sharding.backend_choice import Backend, backend_for
from rlhpc.sharding.layout import divisors

# What the other back end's layouts and settings cannot have.
_MEGATRON_KEYS: dict[str, Any] = {
    **{f"actor.parallel.{axis}": 1 for axis in ("tp", "pp", "ep", "etp")},
    **{f"actor.parallel.{name}": None for name in ("vpp", "first_stage_layers", "last_stage_layers")},
    "actor.parallel.expert_dispatch": "alltoall",
    "actor.parallel.sequence_parallel": True,
    "actor.memory.recompute_layers": 1,
    "actor.optimizer.optimizer_offload_fraction": 0.0,
}
_FSDP_KEYS: dict[str, Any] = {
    "actor.parallel.dp_replicate": 1,
    "actor.memory.reshard_after_forward": True,
    "actor.memory.accumulation": "auto",
    "actor.memory.cpu_offload": False,
}


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
    keys = _MEGATRON_KEYS if backend == "fsdp" else _FSDP_KEYS
    changed = changed_config(config, {"train.backend": backend, **keys})
    if config.critic.parallel is not None:
        changed = changed_config(changed, {"critic.parallel": None})
    if backend == "megatron" and config.train.compile == "blocks":
        changed = changed_config(changed, {"train.compile": "auto"})
    return changed


def _copies(config: RunConfig, ranks: int) -> list[int]:
    """Returns numbers of copies of the weights: each on whole nodes, and as configured."""
    nodes = max(1, ranks // config.resources.ranks_per_node)
    return sorted({1, config.actor.parallel.dp_replicate, *divisors(nodes)})
