"""Trainers that are started again within an attempt, while its engines wait for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from rlhpc.config.load import load_config
from rlhpc.core import attempts
from rlhpc.core.attempts import Verdict
from rlhpc.core.exits import ExitRecord
from rlhpc.core.folder import AttemptFolder, RunFolder
from rlhpc.core.store_client import BEGIN, BOARD, LOST_ENGINES, TRAINERS, TrainersStart
from rlhpc.launch.supervise import job_ranks, supervisor
from rlhpc.launch.supervise.job_ranks import JobRanks, TrainersBoard
from rlhpc.launch.supervise.job_store import StoreServer
from rlhpc.launch.supervise.supervisor import Supervisor
from tests.helpers.runs import ROOT
from tests.launch.supervise.test_rollout_engines import Start

KEYS = (
    *("resources.ranks_per_node=2", "slurm.nodes=2", "placement=separate", "rollout.ranks=2"),
    *("recovery.lost_engines=rejoin", "recovery.wait_seconds=7", "recovery.retries=3"),
)
FAILED = ExitRecord(0, "node9", 0, 5.0, "signal", "", "died by signal 9")


@pytest.fixture
def how(tmp_path: Path) -> Start:
    """Two trainers, and two engines of a rank each."""
    attempt = attempts.begin(
        RunFolder(tmp_path), job_id="1", restart_count=0, nodes=("node9",), world_size=4, saved_step=-1
    )
    return Start(load_config(ROOT / "configs" / "demo.yaml", KEYS), attempt, 4)


def ranks_of(how: Start, server: StoreServer, *, begun: bool = True) -> JobRanks:
    ranks = JobRanks.start(how, server, lambda line: None)
    if begun:
        server.write(f"{BOARD}/{BEGIN}", "{}")
    return ranks


def test_the_next_trainers_have_keys_and_records_of_their_own(how: Start, server: StoreServer) -> None:
    ranks = ranks_of(how, server)
    ranks.engines[1].state = replace(ranks.engines[1].state, generation=2)
    (how.attempt.exits / "rank-00001.exit.json").write_text("{}")
    assert ranks.may_start_groups_again()
    ranks.end_groups()
    ranks.start_groups_again()
    assert [(part.ranks, part.generation) for part in how.parts[3:]] == [(range(2), 1)]
    assert [file.name for file in how.attempt.former_exits(0).iterdir()] == ["rank-00001.exit.json"]
    start = TrainersStart.from_json(server.read(TRAINERS))
    assert start == TrainersStart(1, {0: 0, 1: 2})
    assert not ranks.may_start_groups_again()  # before these have begun
    server.write(f"trainers 1/{BOARD}/{BEGIN}", "{}")
    assert ranks.may_start_groups_again()


def test_an_engine_s_generation_is_counted_from_the_trainers_start(server: StoreServer) -> None:
    start = TrainersStart(3, {1: 2})
    assert (start.generation_of(1, 2), start.generation_of(1, 3), start.generation_of(7, 4)) == (0, 1, 4)
    server.write(TRAINERS, start.to_json())
    server.write(f"{BOARD}/{LOST_ENGINES}", '{"1": [1, "of former trainers"]}')
    board = TrainersBoard(server.read)
    assert board.lost_engines() == {}
    server.write(f"{start.prefix}/{BOARD}/{LOST_ENGINES}", '{"1": [1, "does not respond"], "7": [4, "late"]}')
    board = TrainersBoard(server.read)
    assert board.lost_engines() == {1: (3, "does not respond"), 7: (4, "late")}


@pytest.mark.parametrize("what", ["not begun", "engine ended", "engine waits", "node gone"])
def test_when_the_whole_attempt_ends_instead(how: Start, server: StoreServer, what: str) -> None:
    ranks = ranks_of(how, server, begun=what != "not begun")
    if what == "engine ended":
        how.parts[1].ended = {2: FAILED}
    if what == "engine waits":
        ranks.engines[0].state = replace(ranks.engines[0].state, phase="waiting")
    if what == "node gone":
        how.parts[0].gone = "node node9 failed"
    assert not ranks.may_start_groups_again()


def test_an_engine_that_fails_before_rl_begins_ends_the_attempt(
    how: Start, server: StoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainers would wait for it until their start counts as a hang."""
    monkeypatch.setattr(job_ranks, "_GRACE_SECONDS", 0.0)
    ranks = ranks_of(how, server, begun=False)
    how.parts[1].ended = {2: FAILED}
    found = ranks.poll()
    assert found == {2: FAILED}
    assert ranks.losses == 0


class Watched:
    """An attempt's watch whose trainers have failed, with a verdict of the test's."""

    def __init__(self, how: Start, ranks: JobRanks, monkeypatch: pytest.MonkeyPatch) -> None:
        self.verdict = Verdict(9.0, "crash", "a trainer died", "retry", 0, "node9", wait_seconds=7.0)
        self.waited, self.restarted, self.lines = list[float](), list[Verdict](), list[str]()
        self.ranks, self.goes_on, self.during, self.left = ranks, True, lambda: None, 60.0
        monkeypatch.setattr(supervisor, "evidence_of", lambda *_: None)
        attempt = attempts.read_attempt(how.attempt)
        assert attempt is not None
        self.attempt, self.supervisor = attempt, object.__new__(Supervisor)
        known = {"_run": how.attempt.run, "_allocation": self, "_alerts": self}
        self.supervisor.__dict__.update(known, _decide=lambda *_: self.verdict, _pause=self._pause)

    def report_restart(self, folder: AttemptFolder, verdict: Verdict) -> None:
        self.restarted.append(verdict)

    def log(self, line: str) -> None:
        self.lines.append(line)

    def seconds_left(self) -> float:
        return self.left

    def _pause(self, seconds: float) -> bool:
        self.waited.append(seconds)
        self.during()
        return self.goes_on

    def starts_again(self, ended: dict[int, ExitRecord] | None = None) -> bool:
        ranks, ended = cast(Any, self.ranks), {0: FAILED} if ended is None else ended
        return self.supervisor._start_trainers_again(ranks, self.attempt, ended)


def test_trainers_start_again_after_the_policy_s_wait(
    how: Start, server: StoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(how, ranks_of(how, server), monkeypatch)
    writing = how.attempt.run.checkpoints / ".writing-0001"
    (writing / "half").mkdir()
    assert watched.starts_again()
    assert (watched.waited, watched.restarted) == ([7.0], [watched.verdict])
    assert attempts.restarts(how.attempt) == [watched.verdict]
    with open(how.attempt.restarts, "a") as file:  # as another process may see it
        file.write('{"time": 1')
    assert attempts.restarts(how.attempt) == [watched.verdict]
    assert not [*writing.parent.glob(".trash-*")]
    assert [*writing.iterdir()] == []  # former ranks that still run write into another folder
    assert watched.lines[0] == "the trainers ended, crash (rank 0 on node9): a trainer died; the engines wait for them"
    assert watched.lines[1] == "the trainers are started again from the beginning"


def without(watched: Watched, **changes: Any) -> None:
    watched.verdict = replace(watched.verdict, **changes)


def dies_meanwhile(watched: Watched) -> None:
    def die() -> None:
        watched.ranks.engines[0].part.ended = {2: FAILED}

    watched.during = die


def is_over(watched: Watched) -> None:
    watched.left = 0.0


def is_stopped(watched: Watched) -> None:
    watched.goes_on = False


CASES: dict[str, Callable[[Watched], None]] = {
    "stop": lambda watched: without(watched, action="stop"),
    "requeue": lambda watched: without(watched, action="requeue"),
    "smaller": lambda watched: without(watched, overrides=("train.micro_batch=1",)),
    "excluded": lambda watched: without(watched, excluded=("node9",)),
    "an engine dies meanwhile": dies_meanwhile,
    "no time": is_over,
    "the job ends": is_stopped,
}


@pytest.mark.parametrize("case", CASES)
def test_trainers_that_must_not_start_again_beside_their_engines(
    how: Start, server: StoreServer, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    watched = Watched(how, ranks_of(how, server), monkeypatch)
    CASES[case](watched)
    assert not watched.starts_again()
    assert (len(how.parts), watched.restarted, attempts.restarts(how.attempt)) == (3, [], [])


def test_a_checkpoint_in_arrival_order_needs_another_config(
    how: Start, server: StoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(how, ranks_of(how, server), monkeypatch)
    folder = how.attempt.run.checkpoints / "step-00000004"
    folder.mkdir()
    (folder / "state.json").write_text('{"state": {"arrival": {}}}')
    assert not watched.starts_again()


def test_ranks_that_have_ended_well_are_not_started_again(
    how: Start, server: StoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(how, ranks_of(how, server), monkeypatch)
    assert not watched.starts_again({0: replace(FAILED, kind="done")})
