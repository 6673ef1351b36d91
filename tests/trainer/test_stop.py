"""When the ranks stop for the job's end."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from rlhpc.core.context import RankContext, StopRequest
from rlhpc.core.files import write_json
from rlhpc.core.folder import RunFolder
from rlhpc.core.heartbeat import Heartbeat
from rlhpc.core.rank import RankInfo
from rlhpc.trainer import stop
from rlhpc.trainer.stop import Stopper
from tests.helpers.distributed import run_ranks


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


def test_a_checkpoint_is_due_by_time_by_the_first_rank_s_clock_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, sent = [100.0], list[list[int]]()
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, op: sent.append(tensor.tolist()))  # each rank alone
    monkeypatch.setattr(stop, "time", SimpleNamespace(monotonic=lambda: now[0], time=time.time))
    attempt = RunFolder(tmp_path).attempt(1)
    attempt.path.mkdir(parents=True)
    infos = [RankInfo(rank, 2, rank, "node1", "localhost", 1) for rank in (0, 1)]
    first, second = (
        Stopper(RankContext(attempt, info, StopRequest(), Heartbeat(tmp_path, 0)), every_seconds=60) for info in infos
    )
    found = []
    for seconds in (59, 1, 1, 58, 1):
        now[0] += seconds
        assert first.agree() == second.agree() == ("none", False)
        found.append((first.due, second.due))
        if first.due:
            first.checkpointed()
    assert found == [(False, False), (True, False), (False, False), (False, False), (True, False)]
    assert sent[2] == [0, 0, 1], "what the other ranks receive"
    unset = Stopper(RankContext(attempt, infos[0], StopRequest(), Heartbeat(tmp_path, 0)))
    now[0] += 1e6
    unset.agree()
    assert not unset.due


def agree_by_own_clocks(folder: Path) -> bool:
    """Whether a checkpoint is due after a step; the first rank has waited longer than the others."""
    info = RankInfo.from_environ()
    attempt = RunFolder(folder).attempt(1)
    stopper = Stopper(RankContext(attempt, info, StopRequest(), Heartbeat(folder, info.rank)), every_seconds=1000.0)
    stopper._checkpoint_at -= 1e6 if info.rank == 0 else 0.0
    stopper.agree()
    return stopper.due


@pytest.mark.ranks
def test_all_ranks_agree_on_a_checkpoint_by_time(tmp_path: Path) -> None:
    assert run_ranks(agree_by_own_clocks, 2, tmp_path) == [True, True]


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
