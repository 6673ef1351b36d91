"""Choice of how gradients of several microbatches are summed with FSDP2, where the config leaves it to the planner."""

from __future__ import annotations

from typing import Literal

from rlhpc.config.model_settings import actor_settings, critic_settings
from rlhpc.config.schema import RunConfig
from rlhpc.models import ModelDescription
from rlhpc.plan.estimates.fsdp_memory import Accumulation
from rlhpc.plan.estimates.fsdp_parameters import is_plannable
from rlhpc.plan.estimates.hardware import named_gpu, read_site
from rlhpc.plan.estimates.memory import Device, with_planned_accumulation
from rlhpc.sharding.layout import ParallelLayout


def chosen_accumulation(
    config: RunConfig, shape: ModelDescription, layout: ParallelLayout, name: Literal["actor", "critic"] = "actor"
) -> Accumulation:
    """Returns ``memory.accumulation`` of a trained model: as configured; for auto keep, which reduces once an update,
    if every phase fits beside the whole gradients. Depends on the config and the model alone, so that all ranks and
    attempts choose alike: without a GPU named there it is reduce.

    ``layout``: of the ranks that train.
    """
    planned = with_accumulation_of(config, shape, layout)
    settings = actor_settings(planned) if name == "actor" else critic_settings(planned)
    found = settings.memory.accumulation
    return "reduce" if found == "auto" else found


def with_accumulation_of(config: RunConfig, shape: ModelDescription, layout: ParallelLayout) -> RunConfig:
    """Returns the config with what is chosen for each trained model in place of auto, if its back end is FSDP2."""
    if not is_plannable(shape):
        return config
    gpu = named_gpu(config, read_site(config))
    device = Device(gpu.memory_gib, gpu.reserves) if gpu is not None else Device()
    return with_planned_accumulation(config, shape, layout, device)
