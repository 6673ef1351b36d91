"""When the ranks stop for the job's end."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch.distributed as dist

from rlhpc.core.context import RankContext
from rlhpc.core.files import write_json
from rlhpc.core.folder import RunFolder
from rlhpc.core.heartbeat import Heartbeat
from rlhpc.core.rank import RankInfo
from rlhpc.core.stop import StopRequest
from rlhpc.trainer.stop import Stopper


def test_a_deadline_that_cannot_be_read_is_the_last_one_known(tmp_path: Path) -> None:
    attempt = RunFolder(tmp_path).attempt(1)
    attempt.path.mkdir(parents=True)
    stopper = Stopper(RankContext(attempt, RankInfo.from_environ({}), StopRequest(), Heartbeat(tmp_path, 0)))
    assert stopper._end() is None
    write_json(attempt.deadline, {"end": 5.0})
    assert stopper._end() == 5.0
    attempt.deadline.unlink()
    attempt.deadline.symlink_to("/proc/self/mem")  # EIO, from the kernel
    assert stopper._end() == 5.0


@pytest.mark.parametrize(
    ("left", "end_seconds", "reason"), [(100, 0, "none"), (100, 70, "deadline"), (5, 0, "deadline")]
)
def test_the_time_left_is_for_a_step_a_save_and_what_else_an_end_waits_for(
    left: float, end_seconds: float, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, op: None)  # this rank alone
    attempt = RunFolder(tmp_path).attempt(1)
    attempt.path.mkdir(parents=True)
    stopper = Stopper(RankContext(attempt, RankInfo.from_environ({}), StopRequest(), Heartbeat(tmp_path, 0)))
    write_json(attempt.deadline, {"end": time.time() + left})
    stopper.saved(1.0)
    assert stopper.agree(end_seconds) == (reason, False)


@pytest.mark.parametrize(("export", "reason"), [(30.0, "none"), (60.0, "deadline")])
def test_the_time_left_is_for_an_export_too(
    export: float, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice the longest one."""
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, op: None)  # this rank alone
    attempt = RunFolder(tmp_path).attempt(1)
    attempt.path.mkdir(parents=True)
    stopper = Stopper(RankContext(attempt, RankInfo.from_environ({}), StopRequest(), Heartbeat(tmp_path, 0)))
    write_json(attempt.deadline, {"end": time.time() + 100})
    stopper.saved(1.0)
    stopper.exported(export)
    stopper.exported(0.0)
    assert stopper.agree() == (reason, False)


def test_the_time_that_a_job_is_suspended_is_no_step_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An hour, while a minute is left."""
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, op: None)  # this rank alone
    attempt = RunFolder(tmp_path).attempt(1)
    attempt.path.mkdir(parents=True)
    stopper = Stopper(RankContext(attempt, RankInfo.from_environ({}), StopRequest(), Heartbeat(tmp_path, 0)))
    write_json(attempt.deadline, {"end": time.time() + 60})
    stopper.saved(1.0)
    stopper.begin()
    stopper._last -= 3600
    stopper._pauses.seconds += 3600
    stopper.stepped()
    assert stopper.agree() == ("none", False)


def test_an_end_from_before_a_suspension_stops_no_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher reports the new one in a moment."""
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, op: None)  # this rank alone
    attempt = RunFolder(tmp_path).attempt(1)
    attempt.path.mkdir(parents=True)
    stopper = Stopper(RankContext(attempt, RankInfo.from_environ({}), StopRequest(), Heartbeat(tmp_path, 0)))
    write_json(attempt.deadline, {"end": time.time() - 100})
    stopper.saved(1.0)
    stopper._pauses._ended = time.monotonic()
    assert stopper.agree() == ("none", False)
    stopper._pauses._ended = time.monotonic() - 60
    assert stopper.agree() == ("deadline", False)
