"""The training back end of a run on this rank. Part of the composition root: only the one in use is imported."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from rlhpc.api import TrainBackend
from rlhpc.backends.kernels.compiled import choose_compilation
from rlhpc.checkpoint.formats.described import resolve_backend
from rlhpc.config.model_settings import ModelSettings
from rlhpc.config.schema import RunConfig
from rlhpc.config.training import ParallelSection
from rlhpc.core.rank import RankInfo
from rlhpc.models import ModelDescription
from rlhpc.sharding.layout import make_layout
from rlhpc.sharding.mesh_sizes import make_mesh_sizes
from rlhpc.sharding.trainer_shards import TrainerCut


class Backends(Protocol):
    """Makes models of one back end, all over the ranks of this rank's role."""

    def build(self, model: ModelDescription, folder: Path, settings: ModelSettings) -> TrainBackend:
        """A model without weights, frozen if the settings have no optimizer. ``folder`` has its config.json.
        Collective."""

    def beside_engine(self, settings: ModelSettings, tp: int, *, experts: bool) -> ModelSettings:
        """Settings of a model that each engine of ``tp`` ranks has beside it; ``experts``: the model has some. Its
        forward passes need no other engine."""

    def close(self) -> None:
        """Ends what the back end keeps running, at the end of the run."""


def open_backends(config: RunConfig, info: RankInfo, parallel: ParallelSection) -> Backends:
    """The run's back end. ``parallel``: layout of the first model, whose process groups stay active. Collective."""
    choose_compilation(config.train.compile)
    if resolve_backend(config) == "fsdp":
        from rlhpc.trainer.fsdp_models import FsdpModels

        return FsdpModels(config, info)
    from rlhpc.trainer.megatron_models import MegatronModels

    return MegatronModels(config, info, parallel)


def actor_cut(config: RunConfig, ranks: int) -> TrainerCut:
    """Division of the actor's weights among the ranks that train."""
    parallel = config.actor.parallel
    return make_mesh_sizes(parallel, ranks) if resolve_backend(config) == "fsdp" else make_layout(parallel, ranks)
