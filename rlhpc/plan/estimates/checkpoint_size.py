"""Size of a checkpoint on disk."""

from __future__ import annotations

from rlhpc.config.algorithm import WITH_CRITIC
from rlhpc.config.schema import RunConfig
from rlhpc.models import ModelShape
from rlhpc.plan.estimates.optimizer_memory import ITEMSIZE
from rlhpc.sharding.shards import num_parameters

_STATE = 12  # bytes per parameter of master weight and moments


def checkpoint_bytes(config: RunConfig, shape: ModelShape) -> int:
    """Returns the bytes of one checkpoint: weights, master weights and moments of all trained models."""
    each = ITEMSIZE[config.model.dtype] + _STATE
    critic = config.train.steps > 0 and config.algorithm.name in WITH_CRITIC
    reference = config.sft is not None and config.train.steps > 0 and config.algorithm.kl.coefficient > 0
    return num_parameters(shape) * (each * (1 + critic) + ITEMSIZE[config.model.dtype] * reference)
