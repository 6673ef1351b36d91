"""Models of the FSDP2 back end. Part of the composition root."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch
from transformers import PretrainedConfig

from rlhpc.backends.fsdp.fsdp_backend import FsdpBackend
from rlhpc.backends.fsdp.sharded_model import Accumulation, Meshes, make_meshes
from rlhpc.backends.fsdp.source import ModelSource, check_base, read_config
from rlhpc.checkpoint.formats.described import resolve_model
from rlhpc.config.model_settings import ModelSettings
from rlhpc.config.schema import RunConfig
from rlhpc.config.training import ParallelSection
from rlhpc.core.rank import RankInfo
from rlhpc.models import ModelDescription, has_dynamic_rope
from rlhpc.models import read_config as read_fields
from rlhpc.parallel.compat import device
from rlhpc.plan.estimates.memory import chosen_accumulation, sequence_tokens
from rlhpc.sharding.layout import make_layout
from rlhpc.sharding.mesh_sizes import MeshSizes, make_mesh_sizes
from rlhpc.sharding.placement import placement_of


class FsdpModels:
    """Implements ``rlhpc.trainer.backends.Backends``. Models of equal sizes share process groups."""

    def __init__(self, config: RunConfig, info: RankInfo) -> None:
        self._config, self._info = config, info
        self._meshes: dict[MeshSizes, Meshes] = {}

    def build(self, model: ModelDescription, folder: Path, settings: ModelSettings) -> FsdpBackend:
        """See ``Backends``."""
        sizes = make_mesh_sizes(settings.parallel, self._info.world_size)
        if sizes not in self._meshes:
            self._meshes[sizes] = make_meshes(sizes, device().type)
        config = self._read_config(folder, model)
        dtype = getattr(torch, self._config.model.dtype)
        accumulation = self._accumulation(model, settings)
        compiled = self._config.train.compile == "blocks"
        return FsdpBackend(ModelSource(model, config, self._meshes[sizes], dtype, accumulation, compiled), settings)

    def _read_config(self, folder: Path, model: ModelDescription) -> PretrainedConfig:
        """transformers' configuration with the run's RoPE."""
        section, tokens = self._config.model, sequence_tokens(self._config)
        config = read_config(folder, trusted=section.trust_remote_code, tokens=tokens, rope_tokens=section.rope_tokens)
        if section.rope_tokens is not None and has_dynamic_rope(read_fields(folder)):
            check_base(config, model)
        return config

    def _accumulation(self, model: ModelDescription, settings: ModelSettings) -> Accumulation:
        """Way of summing gradients of several microbatches; auto: as the planner finds memory on these ranks."""
        if settings.optimizer is None:
            return "reduce"
        if settings.memory.accumulation != "auto":
            return settings.memory.accumulation
        layout = make_layout(self._config.actor.parallel, placement_of(self._config, self._info.job_size).trainers.size)
        name: Literal["actor", "critic"] = "critic" if model.head == "value" else "actor"
        return chosen_accumulation(self._config, resolve_model(self._config), layout, name)

    def beside_engine(self, settings: ModelSettings, tp: int, *, experts: bool) -> ModelSettings:
        """See ``Backends``: each engine's ranks have a copy, and share sequences."""
        return replace(settings, parallel=ParallelSection(cp=tp, dp_replicate=self._info.world_size // tp))

    def close(self) -> None:
        """See ``Backends``."""
