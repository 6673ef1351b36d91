"""What a run has cost over all its attempts, also those that were killed; what observing costs."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from rlhpc.core import attempts
from rlhpc.core.attempts import Verdict
from rlhpc.core.files import read_json, write_json
from rlhpc.core.folder import AttemptFolder, RunFolder
from rlhpc.core.process import observing, take_observing_seconds
from rlhpc.observe.cost import Cost, CostMeter, earlier_cost
from rlhpc.observe.rank_numbers import Gathered, OwnCost, own_cost_metrics


def begin(run: RunFolder, ago: float) -> AttemptFolder:
    """An attempt of four ranks that began some seconds ago."""
    known = {"job_id": "", "restart_count": 0, "nodes": ("here",), "world_size": 4, "saved_step": -1}
    attempt = attempts.begin(run, **known)
    write_json(attempt.record, {**read_json(attempt.record), "started": time.time() - ago})
    return attempt


def test_cost_counts_on_over_attempts(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    first = CostMeter(begin(run, 100.0), 4)
    assert first.add(8.0, 1000).rank_seconds == pytest.approx(400, abs=20)
    assert first.add(2.0, 500).metrics() == pytest.approx(
        {"cost/gpu_hours": 400 / 3600, "cost/idle_gpu_hours": 10 / 3600, "cost/tokens": 1500}, rel=0.05
    )
    first.write()
    second = CostMeter(begin(run, 50.0), 4)
    total = second.add(1.0, 100)
    assert total.rank_seconds == pytest.approx(600, abs=20)
    assert (total.idle_seconds, total.tokens) == (11.0, 1600)


def test_trainers_that_start_again_within_an_attempt_count_on(tmp_path: Path) -> None:
    attempt = begin(RunFolder(tmp_path), 100.0)
    assert attempts.trainers_since(attempt) == pytest.approx(time.time() - 100, abs=20)
    meter = CostMeter(attempt, 4)
    meter.add(8.0, 1000, absent_seconds=50.0)
    meter.write()
    attempts.begin_again(attempt, Verdict(time.time(), "crash", "killed", "retry"))
    assert attempts.trainers_since(attempt) == pytest.approx(time.time(), abs=20)
    total = CostMeter(attempt, 4).add(1.0, 100)
    assert total.rank_seconds == pytest.approx(350, abs=20)
    assert (total.idle_seconds, total.tokens, total.absent_seconds) == (9.0, 1100, 50.0)


def test_an_attempt_that_hung_costs_its_whole_time(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    attempt = begin(run, 1000.0)
    write_json(attempt.cost, {"rank_seconds": 80.0, "idle_seconds": 3.0, "tokens": 7.0})
    attempts.end(attempt, Verdict(time.time(), "hang", "no progress", "retry"))
    later = begin(run, 0.0)
    assert earlier_cost(later) == Cost(pytest.approx(4000, abs=20), 3.0, 7.0)
    assert earlier_cost(attempt) == Cost()


@pytest.mark.parametrize("text", ["", "[]", "{", '{"tokens": "x"}', '{"other": 1}'])
def test_a_file_that_is_no_cost_counts_nothing(text: str, tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    begin(run, 10.0).cost.write_text(text)
    assert earlier_cost(begin(run, 0.0)) == Cost()


def test_the_cpu_time_of_observers_is_counted_and_sleep_is_not() -> None:
    take_observing_seconds()
    own = OwnCost()
    with observing():
        time.sleep(0.1)
        end = time.thread_time() + 0.05
        while time.thread_time() < end:
            pass
    end = time.thread_time() + 0.05
    while time.thread_time() < end:
        pass
    numbers = own()
    table = np.array([[*numbers.values()], [0.01, float("nan")]])
    found = own_cost_metrics(Gathered(tuple(numbers), table, {}))
    assert found["observe/cpu_seconds"] == pytest.approx(0.06, abs=0.01)
    assert 0.3 < found["observe/cpu_share"] < 0.7
    assert own_cost_metrics(Gathered((), np.empty((2, 0)), {})) == {"observe/cpu_seconds": 0, "observe/cpu_share": 0.0}


def test_ranks_that_were_not_there_cost_nothing(tmp_path: Path) -> None:
    """Neither in this attempt nor, once it has a verdict, for the next one."""
    run = RunFolder(tmp_path)
    attempt = begin(run, 100.0)
    meter = CostMeter(attempt, 4)
    assert meter.add(0.0, 10.0, absent_seconds=150.0).rank_seconds == pytest.approx(250, abs=20)
    meter.write()
    attempts.end(attempt, Verdict(time.time() + 50, "requeued", "", "none"))
    assert earlier_cost(begin(run, 0.0)).rank_seconds == pytest.approx(450, abs=20)
