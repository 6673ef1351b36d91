"""Commands that follow a run ask the controller seldom, and notice the end of its job soon after it."""

from __future__ import annotations

import time as real_time
from itertools import pairwise
from pathlib import Path

import pytest

from rlhpc.core import attempts
from rlhpc.core.attempts import Verdict
from rlhpc.core.errors import UserError
from rlhpc.core.folder import RunFolder
from rlhpc.launch.runs import follow
from rlhpc.launch.runs.follow import FollowedJob
from rlhpc.launch.runs.run_registry import RunEntry, new_record, read_run, register
from rlhpc.launch.slurm.queue import JobStatus

KNOWN = {"job_id": "7", "restart_count": 0, "nodes": ("node1",), "world_size": 1, "saved_step": -1}


class Controller:
    """Slurm's controller, and the clock of the commands. ``asked``: when it was."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.state, self.asked = 1000.0, "RUNNING", list[float]()
        monkeypatch.setattr(follow, "time", self)
        monkeypatch.setattr(follow, "read_job", self._answer)

    def monotonic(self) -> float:
        return self.now

    def _answer(self, job_id: str, _cluster: str = "") -> JobStatus:
        self.asked.append(self.now)
        if self.state == "AWAY":
            raise UserError("squeue failed: Unable to contact slurm controller", where="slurm", remedy="wait")
        return JobStatus(job_id, self.state)

    def pass_by(self, followed: FollowedJob, seconds: float) -> None:
        """So much time, in which a command looks five times a second."""
        for _ in range(int(5 * seconds)):
            followed.look()
            self.now += 0.2


@pytest.fixture
def controller(monkeypatch: pytest.MonkeyPatch) -> Controller:
    return Controller(monkeypatch)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunEntry:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    folder = RunFolder(tmp_path / "run").create()
    folder.config.write_text("name: run\n")
    register(folder, new_record("7", "run", tmp_path, tmp_path / "batch.log"))
    return read_run(folder.path)


def gaps(asked: list[float]) -> list[float]:
    return [later - earlier for earlier, later in pairwise(asked)]


def test_an_hour_without_news_costs_sixty_questions(run: RunEntry, controller: Controller) -> None:
    controller.pass_by(FollowedJob(run), 3600)
    assert 58 <= len(controller.asked) <= 62
    assert gaps(controller.asked)[:3] == pytest.approx([15, 30, 60], abs=2.1)


def test_news_every_second_cost_a_question_in_15_seconds(run: RunEntry, controller: Controller) -> None:
    followed = FollowedJob(run)
    for second in range(600):
        attempts.begin(run.folder, **KNOWN) if second % 10 == 0 else None
        controller.state = "RUNNING" if second % 2 else "PENDING"
        controller.pass_by(followed, 1)
    assert min(gaps(controller.asked)) >= 15
    assert len(controller.asked) > 30


def test_the_end_of_a_job_is_noticed_seconds_after_its_verdict(run: RunEntry, controller: Controller) -> None:
    followed = FollowedJob(run)
    attempt = attempts.begin(run.folder, **KNOWN)
    controller.pass_by(followed, 300)
    attempts.end(attempt, Verdict(real_time.time(), "finished", "", "none"))
    controller.state = "COMPLETED"
    controller.pass_by(followed, 16)
    assert followed.is_over
    count = len(controller.asked)
    controller.pass_by(followed, 300)
    assert len(controller.asked) == count, "nothing is left to ask"


def test_a_job_that_was_just_submitted_is_not_asked_about_at_once(run: RunEntry, controller: Controller) -> None:
    followed = FollowedJob(run, known=True)
    controller.pass_by(followed, 14)
    assert controller.asked == []
    attempts.begin(run.folder, **KNOWN)
    controller.pass_by(followed, 6)
    assert len(controller.asked) == 1


def test_a_controller_that_is_away_is_reported_once_and_asked_less(
    run: RunEntry, controller: Controller, capsys: pytest.CaptureFixture[str]
) -> None:
    controller.state, followed = "AWAY", FollowedJob(run)
    controller.pass_by(followed, 600)
    assert len(controller.asked) <= 12
    assert not followed.is_over
    assert capsys.readouterr().err.count("Unable to contact") == 1
    controller.state = "COMPLETED"
    controller.pass_by(followed, 61)
    assert followed.is_over
