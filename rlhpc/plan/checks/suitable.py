"""Whether nodes, batches, recomputation and GPU memory suit a layout that fits ranks and model."""

from __future__ import annotations

from contextlib import suppress

from rlhpc.config.schema import RunConfig
from rlhpc.core.errors import UserError
from rlhpc.models import ModelDescription, ModelShape
from rlhpc.plan.checks.training import check_memory
from rlhpc.plan.estimates.hardware import linked_ranks, named_gpu, read_site
from rlhpc.plan.estimates.memory import predict_memory
from rlhpc.sharding.layout import ParallelLayout

_KEYS = ("tp", "pp", "cp", "ep", "etp", "vpp", "first_stage_layers", "last_stage_layers")


def suits(config: RunConfig, shape: ModelDescription | None, layout: ParallelLayout) -> bool:
    """Whether a run of ``config`` with this layout of the actor would start; memory counts if a GPU is named."""
    if not _is_fed(config, layout):
        return False
    if not isinstance(shape, ModelShape):
        return True
    with suppress(UserError):
        gpu = named_gpu(config, read_site(config))
        ranks, asked = config.resources.ranks_per_node, config.actor.parallel
        linked = linked_ranks(ranks, gpu)
        for axis in ("tp", "etp"):
            size = layout.size(axis)
            if ranks % size and not size <= linked > ranks and size != getattr(asked, axis):
                return False
        check_memory(config.actor.memory, shape, layout)
        if gpu is None:
            return True
        parallel = asked.model_copy(update={key: getattr(layout, key) for key in _KEYS})
        actor = config.actor.model_copy(update={"parallel": parallel})
        tried = config.model_copy(update={"actor": actor})
        return predict_memory(tried, shape, layout, gpu.memory_gib, gpu.reserves).first_too_large is None
    return False


def _is_fed(config: RunConfig, layout: ParallelLayout) -> bool:
    """Whether every data-parallel rank gets a sample of each minibatch."""
    train, sft = config.train, config.sft
    samples = train.prompts_per_step * config.rollout.samples_per_prompt
    return (not train.steps or samples // train.minibatches >= layout.dp) and (
        sft is None or sft.sequences_per_step >= layout.dp
    )
