"""The models of a run and its engine: which is built first, and what of the models stays on the device."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhpc.algo import find_algorithm
from rlhpc.backends.megatron.optimizer import device_tensors
from rlhpc.config.load import load_config
from rlhpc.core.context import RankContext, StopRequest
from rlhpc.core.folder import AttemptFolder
from rlhpc.core.heartbeat import Heartbeat
from rlhpc.core.rank import RankInfo
from rlhpc.data import arithmetic
from rlhpc.models import read_model
from rlhpc.parallel.offload import KINDS
from rlhpc.rollout.vllm_engine import VllmEngine
from rlhpc.trainer.models import make_models
from tests.helpers.distributed import run_ranks
from tests.helpers.equality import leave_former
from tests.helpers.runs import write_config
from tests.helpers.tiny_models import make_model

pytestmark = [pytest.mark.ranks, pytest.mark.vllm]

OFFLOAD = {"parameters": True, "gradients": True, "optimizer": True}


def test_the_actor_is_away_when_an_engine_is_to_wake(tmp_path: Path) -> None:
    """A warm-up without validation needs no engine, and keeps it."""
    model = make_model(tmp_path / "model", "qwen2")
    config = write_config(tmp_path, model__path=str(model), actor__memory__offload=OFFLOAD)
    (held,) = run_ranks(_look, 1, config)
    assert held["with an engine"] == 0
    assert held["without"] > 0


def test_an_engine_sleeps_when_optimizers_are_built(tmp_path: Path) -> None:
    """PPO's actor and critic, with a user's optimizer that looks for an engine among its callers' variables."""
    arithmetic.make(str(tmp_path / "inputs"))
    optimizer = {"function": "tests.trainer.test_models:watching"}
    config = write_config(
        tmp_path,
        sft=None,
        prepare=None,
        algorithm__name="ppo",
        actor__optimizer=optimizer,
        critic__optimizer=optimizer,
        data__validation=[],
    )
    (seen,) = run_ranks(_build, 1, config, tmp_path / "run" / "attempts" / "0000")
    assert seen == [["kv_cache", "weights"]] * 2


_seen: list[list[str]] = []  # what was asleep of an engine when an optimizer was built; empty without one


def watching(params: Any) -> Any:
    """AdamW."""
    callers = (frame for frame, _ in traceback.walk_stack(None))
    engines = [value for frame in callers for value in frame.f_locals.values() if isinstance(value, VllmEngine)]
    _seen.append(sorted(part for engine in engines for part in engine._asleep))
    return torch.optim.AdamW(params)


def _build(file: Path, attempt: Path) -> list[list[str]]:
    from rlhpc.trainer.build import build

    info, folder = RankInfo.from_environ(), AttemptFolder(attempt)
    heartbeat = Heartbeat(folder.heartbeats, info.rank)
    build(load_config(file), RankContext(folder, info, StopRequest(), heartbeat)).close()
    return sys.modules["tests.trainer.test_models"]._seen


def _look(file: Path) -> dict[str, int]:
    found = {"with an engine": _held(load_config(file))}
    leave_former()
    return {**found, "without": _held(load_config(file, ("data.validation=[]", "train.steps=0")))}


def _held(config: Any) -> int:
    """Bytes of the actor on the device."""
    algorithm = find_algorithm(config.algorithm) if config.train.steps else None
    models = make_models(config, RankInfo.from_environ(), read_model(config.model.path), algorithm)
    actor = models.actor.model
    tensors = [t for kind in KINDS for t in device_tensors(actor.models, actor.optimizer, kind)]
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())
