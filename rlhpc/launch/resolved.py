"""The configuration that a run folder gets: with the virtual costs of the schedule, if some ranks only generate."""

from __future__ import annotations

from typing import Any

from rlhpc.config import yaml12
from rlhpc.config.placement import CostsSection
from rlhpc.config.schema import RunConfig
from rlhpc.core.files import read_text
from rlhpc.core.folder import RunFolder
from rlhpc.core.storage import exists
from rlhpc.models import read_model
from rlhpc.plan.estimates.hardware import named_gpu, read_site
from rlhpc.plan.estimates.virtual_costs import (
    default_costs,
    predicted_costs,
    predicted_lend_overhead,
    rounded_cost,
)
from rlhpc.plan.simulation import best_lend_seconds
from rlhpc.sharding.placement import engine_ranks

_COSTS = ("step_seconds", "sequence_seconds", "train_seconds")


def resolved(config: RunConfig, folder: RunFolder) -> RunConfig:
    """Returns the config with every cost that it leaves open: as in the run that ``folder`` already contains, so that
    a resumed run follows the same schedule, else predicted. The model must be there."""
    costs = config.asynchrony.costs
    names = (*_COSTS, "lend_seconds") if config.placement == "lend" else _COSTS
    absent = [name for name in names if getattr(costs, name) is None]
    if engine_ranks(config) is None or not absent:
        return config
    earlier = _earlier_costs(folder)
    found: dict[str, Any] = {name: earlier[name] for name in absent if earlier.get(name) is not None}
    if len(found) < len(absent):
        given = {name: getattr(costs, name) for name in names if name not in absent}
        predicted = _predicted(config, CostsSection.model_validate(given | found))
        found = {name: getattr(predicted, name) for name in absent} | found
    # Validated: an earlier file is an input like any other.
    section = CostsSection.model_validate({**costs.model_dump(), **found})
    return config.model_copy(update={"asynchrony": config.asynchrony.model_copy(update={"costs": section})})


def _predicted(config: RunConfig, known: CostsSection) -> CostsSection:
    """Returns all costs; ``known`` are those that are not to be predicted."""
    site = read_site(config)
    gpu = named_gpu(config, site)
    overhead = 0.0
    if gpu is None or config.slurm.gpus_per_node == 0:
        found = default_costs(config)
    else:
        shape = read_model(config.model.path, config.model.family)
        found = predicted_costs(config, shape, gpu, site.efficiency)
        if config.placement == "lend":
            overhead = predicted_lend_overhead(config, shape, gpu, site.efficiency)
    if config.placement != "lend" or known.lend_seconds is not None:
        return found
    given = known.model_dump(exclude_none=True, include=set(_COSTS))
    lend = best_lend_seconds(config, found.model_copy(update=given), overhead)
    return found.model_copy(update={"lend_seconds": rounded_cost(lend)})


def _earlier_costs(folder: RunFolder) -> dict[str, Any]:
    """Returns the costs in the folder's own configuration; empty without one."""
    if not exists(folder.config):
        return {}
    found: Any = yaml12.parse(read_text(folder.config), str(folder.config))
    for key in ("asynchrony", "costs"):
        found = found.get(key) if isinstance(found, dict) else None
    return found if isinstance(found, dict) else {}
