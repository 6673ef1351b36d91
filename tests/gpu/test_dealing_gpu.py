"""Responses take turns on a GPU, where a step may be in flight when one is interrupted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.gpu.test_vllm_gpu import COMPILED, WIDE
from tests.helpers.distributed import run_ranks
from tests.helpers.tiny_models import make_model
from tests.rollout import engines
from tests.rollout.test_moved_responses import all_tasks, dealing_of

pytestmark = [pytest.mark.gpu, pytest.mark.ranks]


def on_rank(path: Path) -> dict[str, Any]:
    engine = engines.ready(path, max_num_seqs=3)
    return dealing_of(engine, 1, False, ("equal", "turns"))


def test_turns_lose_no_token(tmp_path: Path) -> None:
    """In bfloat16 a token here and there may differ, and all that follow it."""
    make_model(tmp_path / "m", "qwen3", 0, **WIDE)
    (found,) = run_ranks(on_rank, 1, tmp_path / "m", environ=COMPILED)
    assert found["turns"]["put_back"] > 0
    equal, turns = found["equal"]["found"], found["turns"]["found"]
    longest = {(task.group, task.index): task.sampling.max_tokens for task in all_tasks() if task.sampling}
    assert {place: len(sample.log_probs) for place, sample in turns.items()} == longest
    same = [np.mean(turns[place].tokens[:28] == sample.tokens[:28]) for place, sample in equal.items()]
    assert np.mean(same) > 0.8
