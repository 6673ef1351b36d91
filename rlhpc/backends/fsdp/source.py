"""Inputs from which a model of the FSDP2 back end is built."""

from __future__ import annotations

from dataclasses import dataclass
from math import isclose
from pathlib import Path

import torch
from transformers import AutoConfig, PretrainedConfig

from rlhpc.backends.fsdp.sharded_model import Accumulation, Head, Meshes, bases, with_run_rope
from rlhpc.core.errors import UserError
from rlhpc.models import ModelDescription


@dataclass(frozen=True)
class ModelSource:
    """A model's architecture, and how it is sharded and stored. ``dtype``: of computation and of exported weights."""

    shape: ModelDescription
    config: PretrainedConfig
    meshes: Meshes
    dtype: torch.dtype
    accumulation: Accumulation = "reduce"
    compile_layers: bool = False

    @property
    def head(self) -> Head:
        return "value" if self.shape.head == "value" else "lm"


def read_config(
    folder: Path, *, trusted: bool = False, tokens: int | None = None, rope_tokens: int | None = None
) -> PretrainedConfig:
    """transformers' configuration of the model in a folder. ``trusted``: code of the folder may be executed;
    ``tokens``: of a run's longest sequence, whose rotary tables the model gets, None outside of runs;
    ``rope_tokens``: at which dynamic RoPE is fixed, None to leave it as it is."""
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=trusted)
    return config if tokens is None else with_run_rope(config, tokens, rope_tokens)


def check_base(config: PretrainedConfig, model: ModelDescription) -> None:
    """Raises UserError if a base that ``model.rope_tokens`` has changed is not the one that the engine gets, because
    transformers rotates another number of dimensions than config.json shows."""
    found, described = bases(config), model.rope
    if described is not None and found and not any(isclose(base, described.theta, rel_tol=1e-9) for base in found):
        raise UserError(
            f"transformers rotates with base {min(found):g}, but config.json shows {described.theta:g}",
            where="model.rope_tokens",
            remedy="add partial_rotary_factor to config.json as the model was published",
        )
