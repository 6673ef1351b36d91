"""Configuration of a run folder, with values for the keys that are left open.

These are the present time for the chat template, the engines' concurrent sequences, and the virtual costs of the
schedule if some ranks only generate.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

from rlhpc.checkpoint.formats.described import resolve_model
from rlhpc.config import yaml12
from rlhpc.config.data import DataSection
from rlhpc.config.rollout import CostsSection, RolloutSection
from rlhpc.config.schema import RunConfig
from rlhpc.core.errors import UserError
from rlhpc.core.files import read_text
from rlhpc.core.folder import RunFolder
from rlhpc.core.storage import exists
from rlhpc.plan.estimates.fsdp_memory import with_accumulation
from rlhpc.plan.estimates.fsdp_parameters import is_plannable
from rlhpc.plan.estimates.hardware import named_gpu, read_site
from rlhpc.plan.estimates.memory import engine_section, with_accumulation_of
from rlhpc.plan.estimates.step_time import (
    default_costs,
    predicted_costs,
    predicted_lend_overhead,
    rounded_cost,
)
from rlhpc.plan.simulation import best_lend_seconds
from rlhpc.sharding.layout import make_layout
from rlhpc.sharding.placement import backend_for, engine_ranks, training_ranks

_COSTS = ("step_seconds", "sequence_seconds", "train_seconds")


def resolved(config: RunConfig, folder: RunFolder) -> RunConfig:
    """Returns the config with ``data.template_time``, ``rollout.max_num_seqs``, ``memory.accumulation`` and every cost
    that it leaves open: as in the run that ``folder`` already contains, so that a resumed run has the same prompts and
    follows the same schedule, else predicted, for which the model must be there."""
    earlier = _earlier(folder)
    config = _with_sequences(_with_accumulation(_with_template_time(config, earlier), earlier), earlier)
    costs = config.asynchrony.costs
    names = (*_COSTS, "lend_seconds") if config.placement == "lend" else _COSTS
    absent = [name for name in names if getattr(costs, name) is None]
    if engine_ranks(config) is None or not absent:
        return config
    known = _section(_section(earlier, "asynchrony"), "costs")
    found: dict[str, Any] = {name: known[name] for name in absent if known.get(name) is not None}
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
    shape = resolve_model(config) if gpu is not None and config.slurm.gpus_per_node != 0 else None
    if gpu is None or shape is None or not is_plannable(shape):
        found = default_costs(config)
    else:
        found = predicted_costs(config, shape, gpu, site.efficiency)
        if config.placement == "lend":
            overhead = predicted_lend_overhead(config, shape, gpu, site.efficiency)
    if config.placement != "lend" or known.lend_seconds is not None:
        return found
    given = known.model_dump(exclude_none=True, include=set(_COSTS))
    lend = best_lend_seconds(config, found.model_copy(update=given), overhead)
    return found.model_copy(update={"lend_seconds": rounded_cost(lend)})


def _with_template_time(config: RunConfig, earlier: dict[str, Any]) -> RunConfig:
    if config.data.template_time is not None:
        return config
    moment = _section(earlier, "data").get("template_time") or datetime.now().replace(microsecond=0)
    section = DataSection.model_validate({**config.data.model_dump(), "template_time": moment})
    return config.model_copy(update={"data": section})


def _with_accumulation(config: RunConfig, earlier: dict[str, Any]) -> RunConfig:
    """Returns the config with what FSDP2 does with gradients of several microbatches: as in the earlier run if ranks
    and batch are still the same, because sums in another order differ in their last bits; else as the planner chooses
    on the fewest nodes."""
    memory = config.actor.memory
    if memory.accumulation != "auto" or config.slurm.gpus_per_node == 0:
        return config
    try:
        model = resolve_model(config)
        if backend_for(config, model) != "fsdp":
            return config
        known = _section(_section(earlier, "actor"), "memory").get("accumulation")
        if known in ("keep", "reduce") and _decisive(config.model_dump(mode="json")) == _decisive(earlier):
            return with_accumulation(config, known)
        ranks = training_ranks(config, config.slurm.least_nodes * config.resources.ranks_per_node)
        return with_accumulation_of(config, model, make_layout(config.actor.parallel, ranks))
    except UserError:
        return config  # the ranks end with this error


def _with_sequences(config: RunConfig, earlier: dict[str, Any]) -> RunConfig:
    """Returns the config with ``rollout.max_num_seqs``: that of the earlier run if engines, ranks and the batch are
    still the same, else predicted."""
    rollout = config.rollout
    if rollout.max_num_seqs is not None or not (config.train.steps or config.data.validation):
        return config
    number = _section(earlier, "rollout").get("max_num_seqs")
    if number is None or _decisive(config.model_dump(mode="json")) != _decisive(earlier):
        gpu = named_gpu(config, read_site(config)) if config.slurm.gpus_per_node != 0 else None
        try:
            shape = resolve_model(config)
        except UserError:
            return config  # the ranks end with this error
        number = engine_section(config, shape, gpu.memory_bytes if gpu is not None else None).max_num_seqs
    # Validated: an earlier file is an input like any other.
    section = RolloutSection.model_validate({**rollout.model_dump(), "max_num_seqs": number})
    return config.model_copy(update={"rollout": section})


def _decisive(config: dict[str, Any]) -> list[Any]:
    """Returns the values of a configuration that decide the number of an engine's sequences. The plan's lengths are not
    among them: a better estimate does not change a run."""
    rollout, placed = _section(config, "rollout"), [config.get("placement"), config.get("resources")]
    own = {key: value for key, value in rollout.items() if key != "max_num_seqs"}
    return [own, *placed, _section(config, "slurm").get("nodes"), _section(config, "train").get("prompts_per_step")]


def _earlier(folder: RunFolder) -> dict[str, Any]:
    """Returns the folder's own configuration; empty without one."""
    if not exists(folder.config):
        return {}
    found: Any = yaml12.parse(read_text(folder.config), str(folder.config))
    return found if isinstance(found, dict) else {}


def _section(config: dict[str, Any], name: str) -> dict[str, Any]:
    """Returns a section of a parsed configuration; empty if there is none."""
    found = config.get(name)
    return found if isinstance(found, dict) else {}
