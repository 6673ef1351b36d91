"""Size of a checkpoint and of its export on disk."""

from __future__ import annotations

from rlhpc.config.algorithm import WITH_CRITIC
from rlhpc.config.schema import RunConfig
from rlhpc.models import ModelDescription
from rlhpc.plan.estimates.optimizer_memory import ITEMSIZE
from rlhpc.sharding.placement import backend_for
from rlhpc.sharding.shards import num_parameters

_STATE = 12  # bytes per parameter of master weight and moments


def checkpoint_bytes(config: RunConfig, shape: ModelDescription) -> int:
    """Returns the bytes of one checkpoint: weights, master weights and moments of all trained models."""
    # With FSDP2 the master weights are the weights. Its other optimizers have smaller moments.
    each = _STATE + (ITEMSIZE[config.model.dtype] if backend_for(config, shape) == "megatron" else 0)
    critic = config.train.steps > 0 and config.algorithm.name in WITH_CRITIC
    reference = config.sft is not None and config.train.steps > 0 and config.algorithm.kl.coefficient > 0
    return num_parameters(shape) * (each * (1 + critic) + ITEMSIZE[config.model.dtype] * reference)


def export_bytes(config: RunConfig, shape: ModelDescription) -> int:
    """Returns the bytes of the actor as a HuggingFace folder; 0 without checkpoint.export."""
    return num_parameters(shape) * ITEMSIZE[config.model.dtype] if config.checkpoint.export == "hf" else 0


def kept_exports(config: RunConfig) -> int:
    """Returns the most exports on disk at once, with the one being written."""
    section = config.checkpoint
    if section.export == "none":
        return 0
    return {"last": 1, "best": 2, "all": section.keep + (section.keep_best is not None) + 1}[section.export_at]
