"""Trainers whose engines are in rollout jobs: none at first, laggards, all gone again, and for how long."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from rlhpc.api import RunState
from rlhpc.core.folder import AttemptFolder
from rlhpc.observe.engine_activity import EngineActivity
from rlhpc.parallel.board import Board
from rlhpc.rollout.generator.messages import Published, StartPoint, Validated, published_key, start_key
from rlhpc.trainer import engine_desk
from rlhpc.trainer.absences import Absences
from rlhpc.trainer.engine_desk import EngineDesk, Link
from rlhpc.trainer.engine_side import EngineSide, StoppedWaiting
from rlhpc.trainer.laggards import Laggards
from rlhpc.trainer.rejoin import Joining, ask_to_join
from tests.trainer.test_engine_side import TERMS

ELASTIC = replace(TERMS, filtered=False, elastic=True, order="arrival")


class Wire:
    """A channel that only ends."""

    def drop(self) -> None:
        pass


class Inbox:
    """What the test puts in, and which channels are gone."""

    def __init__(self) -> None:
        self.arrived: list[Any] = []
        self.lost: set[Wire] = set()

    def take(self) -> list[Any]:
        taken, self.arrived = self.arrived, []
        return [(0, message) for message in taken]

    def gone(self) -> set[Wire]:
        return self.lost

    def wait(self, seconds: float, phase: str) -> bool:
        return False


class Source:
    """Weights that nobody takes."""

    newest_number = 0

    def offload(self) -> None:
        pass


@pytest.fixture
def inbox() -> Inbox:
    return Inbox()


@pytest.fixture
def board() -> Board:
    return Board(dist.HashStore())


@pytest.fixture
def desk(inbox: Inbox, board: Board, tmp_path: Path) -> EngineDesk:
    activity, attempt = EngineActivity([1, 2]), AttemptFolder(tmp_path / "0001")
    attempt.path.mkdir()
    link = Link(board, inbox, (), activity, attempt, lambda joining: Wire())  # type: ignore[arg-type,return-value]
    made = EngineDesk(ELASTIC, link, None)
    made.begin(RunState(), None)
    made.publish(RunState(), checkpoint=None, validates=True, ends=False)
    return made


def published(board: Board, version: int) -> Published:
    return Published.from_json(board.read([published_key(version)])[published_key(version)])


def test_the_first_engine_that_joins_answers_what_nobody_has(desk: EngineDesk, inbox: Inbox, board: Board) -> None:
    assert (published(board, 0).validates, published(board, 0).engines) == (True, [])
    assert desk.answers(0, 0.0) is None
    ask_to_join(board, Joining(1, 1))
    assert desk.ready() == [Joining(1, 1)]
    desk.connect(Joining(1, 1), 0)
    assert desk.ready() == []
    assert (published(board, 0).validates, published(board, 0).engines) == (True, [1])
    start = board.read([start_key(1, 1)])[start_key(1, 1)]
    assert StartPoint.from_json(start).version == 0
    desk.connect(Joining(0, 1), 0)
    assert published(board, 0).engines == [1]
    inbox.arrived = [Validated(1, 0, [], 1.0)]
    assert desk.answers(0, 0.0) == []


def test_answers_that_were_taken_are_not_asked_for_again(desk: EngineDesk, inbox: Inbox, board: Board) -> None:
    desk.connect(Joining(1, 1), 0)
    inbox.arrived = [Validated(1, 0, [], 1.0)]
    assert desk.answers(0, 0.0) == []
    inbox.lost = {desk.channels[1]}  # type: ignore[arg-type]
    desk.read()
    inbox.lost = set()
    desk.connect(Joining(1, 2), 0)
    assert published(board, 0).engines == [1]
    assert 0 not in desk._validated


def test_a_former_version_whose_engines_are_all_lost_has_no_answers(desk: EngineDesk, inbox: Inbox) -> None:
    desk.connect(Joining(1, 1), 0)
    inbox.lost = {desk.channels[1]}  # type: ignore[arg-type]
    assert desk.answers(0, 0.0) is None
    inbox.lost = set()
    desk.publish(RunState(step=1, policy_version=1), checkpoint=None, validates=False, ends=False)
    assert desk.answers(0, 0.0) == []


def test_waiting_without_engines_is_no_hang(desk: EngineDesk, monkeypatch: pytest.MonkeyPatch, inbox: Inbox) -> None:
    touched: list[str] = []
    monkeypatch.setattr(engine_desk, "touch", touched.append)
    assert desk.batch(0.01) is None
    assert {*touched} == {"waiting for engines"}
    desk.connect(Joining(0, 1), 0)
    touched.clear()
    assert desk.batch(0.01) is None
    assert touched == []


@pytest.mark.usefixtures("alone")
@pytest.mark.heavy
def test_trainers_that_wait_for_engines_stop_when_the_ranks_agree_to(desk: EngineDesk) -> None:
    """Not while an engine is there: then they agree after the step."""
    side = EngineSide(Source(), ELASTIC, None)  # type: ignore[arg-type]
    side._desk, side.agree_to_stop = desk, lambda: "deadline"
    with pytest.raises(StoppedWaiting) as stopped:
        side.batch(1)
    assert stopped.value.reason == "deadline"
    desk.connect(Joining(0, 1), 0)
    side.look_whether_to_stop()
    side.agree_to_stop = lambda: "none"
    desk.present.clear()
    side.look_whether_to_stop()


def test_each_absent_engine_counts_until_it_is_there() -> None:
    absences = Absences(range(1, 3), 100.0)
    absences.look({0}, 104.0)
    absences.look({0, 2}, 106.0)
    assert absences.take() == 2 * 4 + 2
    absences.look({0, 1, 2}, 200.0)
    assert absences.take() == 0


def test_engines_of_the_trainers_job_are_never_absent() -> None:
    absences = Absences(range(2, 2), 0.0)
    absences.look({}, 9.0)
    assert absences.take() == 0


def test_an_engine_is_late_after_its_limit_in_one_step() -> None:
    laggards = Laggards(2.5)
    assert [laggards.look({1}, {0, 1, 2}, float(second)) for second in range(5)] == [[], [], [], [1], [1]]
    laggards.begin_step()
    assert laggards.look({1}, {0, 1, 2}, 9.0) == []
    assert laggards.take() == (1, 4.0)
    assert laggards.take() is None


def test_nobody_is_late_if_all_hold_a_step_up() -> None:
    laggards = Laggards(0.5)
    assert [laggards.look({0, 1}, {0, 1}, float(second)) for second in range(4)] == [[]] * 4
    assert laggards.take() is None


def test_an_engine_that_is_back_counts_from_the_beginning() -> None:
    laggards = Laggards(1.5)
    assert [laggards.look({1}, {0, 1}, float(second)) for second in range(3)] == [[], [], [1]]
    laggards.forget(1)
    assert laggards.look({1}, {0, 1}, 3.0) == []


def test_time_in_which_nobody_looked_counts_little() -> None:
    laggards = Laggards(None)
    laggards.look({1}, {0, 1}, 0.0)
    laggards.look({1}, {0, 1}, 1000.0)
    assert laggards.take() == (1, 1.0)
