"""Choice of the training back end of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from rlhpc.models import ModelDescription, ModelShape

if TYPE_CHECKING:
    from rlhpc.config.schema import RunConfig

Backend = Literal["megatron", "fsdp"]


def backend_of(config: RunConfig, *, known: bool = True) -> Backend:
    """The back end of all models of a run. ``known``: rlhpc describes the family of the actor's model."""
    if config.train.backend == "auto":
        return "megatron" if known else "fsdp"
    return config.train.backend


def backend_for(config: RunConfig, model: ModelDescription | None) -> Backend:
    """The back end, by the actor's model; for auto without one, which may have yet to be made, megatron."""
    return backend_of(config, known=model is None or isinstance(model, ModelShape))
