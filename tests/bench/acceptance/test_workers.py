"""Processes of parts: their reports arrive, and a crash ends only its own case."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.acceptance import process
from bench.acceptance.process import WorkerCall, WorkerFailed, Workers
from bench.acceptance.results import Context, Figure, Goal, Skipped
from tests.bench.acceptance import part_runs

pytestmark = pytest.mark.workers

FUNCTIONS = "tests.bench.acceptance.worker_functions:"


@pytest.fixture
def context(tmp_path: Path) -> Context:
    return Context(tmp_path, "tiny", False, results.append, lines.append)


results: list[Any] = []
lines: list[str] = []


@pytest.fixture(autouse=True)
def _nothing_reported() -> None:
    results.clear()
    lines.clear()


def test_results_logs_and_values_of_every_rank_arrive(context: Context) -> None:
    call = WorkerCall("case", f"{FUNCTIONS}report", {"value": 0.5}, ranks=2, share_gpu=True)
    (values,) = process.run_each(context, [call])
    assert values == [{"value": 0.5, "rank": str(rank), "local rank": "0", "size": "tiny"} for rank in (0, 1)]
    assert results.count(Figure("seconds", 0.5, "s", Goal("<", 1.0), "a note")) == 2
    assert results.count(Skipped("graphs", "no GPU")) == 2
    assert lines == ["case: at work"] * 2
    assert "a library's print" in (context.folder / "case.log").read_text()


def test_a_crash_is_a_missed_goal_and_the_next_case_runs(context: Context) -> None:
    functions = {"crashing": "crash", "refusing": "refuse", "good": "report"}
    arguments = {"good": {"value": 0.5}}
    calls = [WorkerCall(name, FUNCTIONS + function, arguments.get(name, {})) for name, function in functions.items()]
    process.run_each(context, calls)
    found = part_runs.figures(results)
    assert part_runs.missed(results) == ["crashing: completed", "refusing: completed"]
    assert found["crashing: completed"].note == "killed by SIGSEGV"
    assert found["refusing: completed"].note == "ValueError: no room for a model"
    assert list(found) == ["before the crash", "crashing: completed", "refusing: completed", "seconds"]
    assert any("last words" in line for line in lines)


@pytest.mark.parametrize("threads", [0, 100])
def test_the_end_of_a_crash_has_what_came_before_its_stacks(threads: int) -> None:
    before = [f"line {number}" for number in range(50)]
    stacks = ["Fatal Python error: Segmentation fault", *(f"Thread {number}" for number in range(threads))]
    shown = process.end_of([*before, *stacks])
    assert "line 49" in shown
    assert stacks[0] in shown
    assert process.end_of(before)[-1] == "line 49"
    assert process.end_of(["one"]) == ["one"]


def test_a_rank_that_fails_ends_the_others(context: Context) -> None:
    with Workers(context, WorkerCall("ranks", f"{FUNCTIONS}fail_on_rank_1", ranks=2)) as both:
        both.go()
        with pytest.raises(WorkerFailed, match="rank 1 failed"):
            both.finish()
    assert all(one.poll() is not None for one in both._processes)


def test_a_death_is_seen_though_a_forked_process_lives_on(context: Context) -> None:
    with Workers(context, WorkerCall("fork", f"{FUNCTIONS}die_with_a_fork")) as workers_:
        workers_.go()
        with pytest.raises(WorkerFailed, match="killed by SIGKILL"):
            workers_.finish()


def test_a_serving_process_makes_an_item_when_asked(context: Context) -> None:
    with Workers(context, WorkerCall("server", f"{FUNCTIONS}count")) as server:
        server.go()
        assert [server.answer(), server.ask(), server.ask()] == [0, 1, 2]
        server.close()
    assert server.log.read_text().endswith("closed\n")


def test_lanes_run_beside_each_other(context: Context) -> None:
    calls = [
        [WorkerCall(f"{lane}{i}", f"{FUNCTIONS}report", {"value": lane + i / 10}) for i in (1, 2)] for lane in (3, 5)
    ]
    process.run_lanes(context, calls)
    assert sorted(figure.value for figure in results if isinstance(figure, Figure)) == [3.1, 3.2, 5.1, 5.2]
