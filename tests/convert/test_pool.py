"""Worker processes of a conversion: results, errors and kills arrive where the tasks were given."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rlhpc.convert.pool import run_tasks
from rlhpc.core.errors import UserError

pytestmark = pytest.mark.workers


def prepare() -> Callable[[int], tuple[int, int]]:
    return lambda task: (task * 10, os.getpid())


@pytest.mark.parametrize("workers", [1, 2])
def test_each_task_has_its_result(workers: int) -> None:
    results = dict(run_tasks(prepare, [3, 1, 2], workers))
    assert {index: number for index, (number, _) in results.items()} == {0: 30, 1: 10, 2: 20}
    assert (os.getpid() in {process for _, process in results.values()}) == (workers == 1)


def test_a_killed_worker_is_reported() -> None:
    with pytest.raises(UserError, match="--workers: a worker process was killed"):
        list(run_tasks(lambda: lambda task: os.kill(os.getpid(), signal.SIGKILL), [1, 2], 2))


def test_an_error_of_a_task_arrives_while_others_run_and_the_rest_is_cancelled(tmp_path: Path) -> None:
    def run(task: int) -> None:
        if task == 0:
            raise UserError("no room", where="disk")
        (tmp_path / str(task)).touch()
        time.sleep(60)

    began = time.monotonic()
    with pytest.raises(UserError, match="disk: no room"):
        list(run_tasks(lambda: run, range(50), 2))
    assert time.monotonic() - began < 30
    assert len(list(tmp_path.iterdir())) < 3
