"""Proofs, in the first minutes of a job, that trainer and engine compute the run's models as transformers does."""

from __future__ import annotations

import logging
from pathlib import Path

import torch.distributed as dist

from rlhpc.checkpoint.formats.described import resolve_model
from rlhpc.config.schema import RunConfig
from rlhpc.core.heartbeat import enter
from rlhpc.plan.checks.architecture import (
    ENGINE,
    TRAINER,
    ProbeResult,
    check_results,
    probed_folders,
    served_folders,
)
from rlhpc.sharding.shards import num_parameters

_log = logging.getLogger(__name__)
# The first step of a smaller model, with the log-probs of both sides, comes before its proof would.
_LEAST_SERVED = 100e6  # parameters


def check_architecture(config: RunConfig) -> None:
    """Raises UserError on every rank for a model that cannot be trained. To be called before engine and models are
    built. Collective over the ranks of this one's world."""
    folders = probed_folders(config)
    if not folders:
        return
    enter("checking the architecture")
    found: list[dict[str, ProbeResult]] = [{}]
    if dist.get_rank() == 0:
        from rlhpc.backends.fsdp.probe import probe

        found = [{key: probe(folder) for key, folder in folders.items()}]
    dist.broadcast_object_list(found, src=0)
    check_results(config, found[0], TRAINER)


def check_engine(config: RunConfig) -> None:
    """Raises UserError on every rank for a model that vLLM computes otherwise, and warns where nothing proves it. To be
    called as ``check_architecture``."""
    folders = served_folders(config)
    if not folders or num_parameters(resolve_model(config)) < _LEAST_SERVED:
        return
    enter("checking the engine's model")
    found: list[dict[str, ProbeResult]] = [{}]
    if dist.get_rank() == 0:
        found = [{key: result for key, folder in folders.items() if (result := _proved(key, folder)) is not None}]
    dist.broadcast_object_list(found, src=0)
    check_results(config, found[0], ENGINE)


def _proved(key: str, folder: Path) -> ProbeResult | None:
    result = ENGINE.result(folder)
    if result is None:
        _log.warning("%s: no proof here that %s: %s", key, ENGINE.claim, ENGINE.otherwise)
    return result
