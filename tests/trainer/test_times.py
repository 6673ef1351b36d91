"""Times that a run measures outside of its steps: of its start, of what it reads, of its checkpoints."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from rlhpc.config.load import dump_config, load_config
from rlhpc.core import attempts
from rlhpc.core.attempts import AttemptTimes, read_times
from rlhpc.core.files import write_atomic
from rlhpc.core.folder import AttemptFolder, RunFolder
from rlhpc.data import arithmetic
from tests.helpers.distributed import run_ranks
from tests.helpers.runs import write_config

BEFORE_SECONDS = 50.0  # from the launcher's record to the ranks' own start


@pytest.mark.ranks
@pytest.mark.vllm
def test_each_attempt_measures_its_start_and_its_checkpoints(tmp_path: Path) -> None:
    """A warm-up of two steps with a checkpoint after each, and a resumed one of one more."""
    arithmetic.make(str(tmp_path / "inputs"))
    file = write_config(
        tmp_path, prepare=None, train__steps=0, data__train=[], data__validation=[], checkpoint={"every": 1, "keep": 9}
    )
    began = time.monotonic()
    first, second = (_attempt(file, f"sft.steps={steps}") for steps in (2, 3))
    whole = time.monotonic() - began
    assert (first.resume, len(first.saves), len(second.saves)) == (None, 2, 1)
    assert second.resume is not None
    for times in (first, second):
        assert times.start > BEFORE_SECONDS
        own = times.start - BEFORE_SECONDS + times.models + (times.resume or 0.0) + sum(times.saves)
        assert 0 < times.models < own < whole
        assert all(seconds > 0 for seconds in (*times.saves, times.models))


def _attempt(file: Path, change: str) -> AttemptTimes:
    """The times of the run's next attempt, on two ranks."""
    config = load_config(file, [change])
    folder = RunFolder(config.folder)
    known: dict[str, Any] = {"job_id": "", "restart_count": 0, "nodes": ("here",), "world_size": 2}
    attempt = attempts.begin(folder, **known, saved_step=attempts.saved_step(folder))
    record = json.loads(attempt.record.read_text())
    write_atomic(attempt.record, json.dumps({**record, "started": record["started"] - BEFORE_SECONDS}))
    resources = config.resources.model_copy(update={"ranks_per_node": 2})
    write_atomic(attempt.config, dump_config(config.model_copy(update={"resources": resources})))
    run_ranks(_rank, 2, attempt.path, join=False)
    times = read_times(attempt)
    assert times is not None
    return times


def _rank(path: Path) -> None:
    from rlhpc.core.context import RankContext, StopRequest
    from rlhpc.core.heartbeat import Heartbeat
    from rlhpc.core.rank import RankInfo
    from rlhpc.trainer.main import run_rank

    info, attempt = RankInfo.from_environ(), AttemptFolder(path)
    run_rank(RankContext(attempt, info, StopRequest(), Heartbeat(attempt.heartbeats, info.rank)))


@pytest.mark.parametrize("text", ["", "[]", '{"start": 1}', '{"start": "1", "models": 1, "resume": null, "saves": []}'])
def test_a_file_without_times_is_none(text: str, tmp_path: Path) -> None:
    folder = AttemptFolder(tmp_path)
    assert read_times(folder) is None
    folder.times.write_text(text)
    assert read_times(folder) is None
    folder.times.write_text('{"start": 1, "models": 2.5, "resume": null, "saves": [3]}')
    assert read_times(folder) == AttemptTimes(1.0, 2.5, None, (3.0,))
