"""The models of a run, as they are when the engine is built."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.distributed import run_ranks
from tests.helpers.runs import write_config
from tests.helpers.tiny_models import make_model

pytestmark = [pytest.mark.ranks, pytest.mark.vllm]

OFFLOAD = {"parameters": True, "gradients": True, "optimizer": True}


def test_the_actor_is_away_when_an_engine_is_to_be_built(tmp_path: Path) -> None:
    """A warm-up without validation needs no engine, and keeps it."""
    model = make_model(tmp_path / "model", "qwen2")
    config = write_config(tmp_path, model__path=str(model), actor__memory__offload=OFFLOAD)
    (held,) = run_ranks(_look, 1, config)
    assert held["with an engine"] == 0
    assert held["without"] > 0


def _look(file: Path) -> dict[str, int]:
    from rlhpc.config.load import load_config
    from tests.helpers.equality import leave_former

    found = {"with an engine": _held(load_config(file))}
    leave_former()
    return {**found, "without": _held(load_config(file, ("data.validation=[]", "train.steps=0")))}


def _held(config: Any) -> int:
    """Bytes of the actor on the device."""
    from rlhpc.algo import find_algorithm
    from rlhpc.backends.megatron.offload import KINDS, device_tensors
    from rlhpc.core.rank import RankInfo
    from rlhpc.models import read_model
    from rlhpc.trainer.models import make_models

    algorithm = find_algorithm(config.algorithm) if config.train.steps else None
    models = make_models(config, RankInfo.from_environ(), read_model(config.model.path), algorithm)
    actor = models.actor.model
    tensors = [t for kind in KINDS for t in device_tensors(actor._models, actor._optimizer, kind)]
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())
