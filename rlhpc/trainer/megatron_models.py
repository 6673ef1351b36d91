"""Models of Megatron's back end. Part of the composition root."""

from __future__ import annotations

from pathlib import Path

from rlhpc.backends.megatron import MegatronBackend, end_writers
from rlhpc.config.model_settings import ModelSettings, beside_engine
from rlhpc.config.schema import RunConfig
from rlhpc.config.training import ParallelSection
from rlhpc.core.rank import RankInfo
from rlhpc.models import ModelDescription, ModelShape
from rlhpc.parallel.groups import Groups, build_groups
from rlhpc.sharding.layout import make_layout


class MegatronModels:
    """Implements ``rlhpc.trainer.backends.Backends``."""

    def __init__(self, config: RunConfig, info: RankInfo, parallel: ParallelSection) -> None:
        self._config, self._info = config, info
        self._active = make_layout(parallel, info.world_size)
        build_groups(self._active, config.seed)

    def build(self, model: ModelDescription, folder: Path, settings: ModelSettings) -> MegatronBackend:
        """A model in process groups of its own if its layout differs from that of the active ones."""
        assert isinstance(model, ModelShape), "Megatron's back end has models of known families"
        layout = make_layout(settings.parallel, self._info.world_size)
        groups = Groups(layout) if layout != self._active else None
        return MegatronBackend(model, layout, self._info, self._config.model.dtype, settings, groups)

    def beside_engine(self, settings: ModelSettings, tp: int, *, experts: bool) -> ModelSettings:
        """See ``Backends``."""
        return beside_engine(settings, tp, experts=experts)

    def close(self) -> None:
        """See ``Backends``."""
        end_writers()
