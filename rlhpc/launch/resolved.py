"""The configuration that a run folder gets: with the virtual costs of a separate placement's schedule."""

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
from rlhpc.plan.estimates.virtual_costs import default_costs, predicted_costs
from rlhpc.sharding.placement import engine_ranks

_COSTS = ("step_seconds", "sequence_seconds", "train_seconds")


def resolved(config: RunConfig, folder: RunFolder) -> RunConfig:
    """Returns the config with every cost that it leaves open: as in the run that ``folder`` already contains, so that
    a resumed run follows the same schedule, else predicted. The model must be there."""
    costs = config.asynchrony.costs
    absent = [name for name in _COSTS if getattr(costs, name) is None]
    if engine_ranks(config) is None or not absent:
        return config
    earlier = _earlier_costs(folder)
    found: dict[str, Any] = {name: earlier[name] for name in absent if earlier.get(name) is not None}
    if len(found) < len(absent):
        predicted = _predicted(config)
        found = {name: getattr(predicted, name) for name in absent} | found
    # Validated: an earlier file is an input like any other.
    section = CostsSection.model_validate({**costs.model_dump(), **found})
    return config.model_copy(update={"asynchrony": config.asynchrony.model_copy(update={"costs": section})})


def _predicted(config: RunConfig) -> CostsSection:
    site = read_site(config)
    gpu = named_gpu(config, site)
    if gpu is None or config.slurm.gpus_per_node == 0:
        return default_costs(config)
    shape = read_model(config.model.path, config.model.family)
    return predicted_costs(config, shape, gpu, site.efficiency)


def _earlier_costs(folder: RunFolder) -> dict[str, Any]:
    """Returns the costs in the folder's own configuration; empty without one."""
    if not exists(folder.config):
        return {}
    found: Any = yaml12.parse(read_text(folder.config), str(folder.config))
    for key in ("asynchrony", "costs"):
        found = found.get(key) if isinstance(found, dict) else None
    return found if isinstance(found, dict) else {}
