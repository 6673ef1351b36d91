"""When the ranks stop for the job's end."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from rlhpc.core.context import RankContext, StopRequest
from rlhpc.core.files import write_json
from rlhpc.core.folder import RunFolder
from rlhpc.core.heartbeat import Heartbeat
from rlhpc.core.process import Pauses
from rlhpc.core.rank import RankInfo
from rlhpc.trainer.stop import Stopper
from tests.helpers.distributed import run_ranks


def context_of(folder: Path, info: RankInfo | None = None) -> RankContext:
    """Of the first attempt in a folder."""
    attempt = RunFolder(folder).attempt(1)
    attempt.path.mkdir(parents=True, exist_ok=True)
    info = info or RankInfo.from_environ({})
    return RankContext(attempt, info, StopRequest(), Heartbeat(folder, info.rank))


@pytest.mark.usefixtures("alone")
def test_a_deadline_that_cannot_be_read_is_the_last_one_known(tmp_path: Path) -> None:
    context = context_of(tmp_path)
    stopper = Stopper(context)
    stopper.saved(1.0)
    assert stopper.agree() == ("none", False)
    write_json(context.attempt.deadline, {"end": 5.0})
    assert stopper.agree() == ("deadline", False)
    context.attempt.deadline.unlink()
    context.attempt.deadline.symlink_to("/proc/self/mem")  # EIO, from the kernel
    assert stopper.agree() == ("deadline", False)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("left", "end_seconds", "reason"), [(100, 0, "none"), (100, 70, "deadline"), (5, 0, "deadline")]
)
def test_the_time_left_is_for_a_step_a_save_and_what_else_an_end_waits_for(
    left: float, end_seconds: float, reason: str, tmp_path: Path
) -> None:
    context = context_of(tmp_path)
    stopper = Stopper(context)
    write_json(context.attempt.deadline, {"end": time.time() + left})
    stopper.saved(1.0)
    assert stopper.agree(end_seconds) == (reason, False)


@pytest.mark.usefixtures("alone")
def test_a_checkpoint_is_due_by_time_by_the_first_rank_s_clock_alone(tmp_path: Path) -> None:
    """Of two ranks in worlds of their own, so that neither receives what the other finds."""
    now = [100.0]
    contexts = [context_of(tmp_path, RankInfo(rank, 2, rank, "node1", "localhost", 1)) for rank in (0, 1)]
    first, second = (Stopper(context, every_seconds=60, clock=lambda: now[0]) for context in contexts)
    found = []
    for seconds in (59, 1, 1, 58, 1):
        now[0] += seconds
        assert first.agree() == second.agree() == ("none", False)
        found.append((first.due, second.due))
        if first.due:
            first.checkpointed()
    assert found == [(False, False), (True, False), (False, False), (False, False), (True, False)]
    unset = Stopper(contexts[0], clock=lambda: now[0])
    now[0] += 1e6
    unset.agree()
    assert not unset.due


def agree_by_own_clocks(folder: Path) -> bool:
    """Whether a checkpoint is due after a step; the first rank has waited longer than the others."""
    info = RankInfo.from_environ()
    now = [0.0]
    stopper = Stopper(context_of(folder, info), every_seconds=1000.0, clock=lambda: now[0])
    now[0] += 1e6 if info.rank == 0 else 0.0
    stopper.agree()
    return stopper.due


@pytest.mark.ranks
def test_all_ranks_agree_on_a_checkpoint_by_time(tmp_path: Path) -> None:
    assert run_ranks(agree_by_own_clocks, 2, tmp_path) == [True, True]


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(("export", "reason"), [(30.0, "none"), (60.0, "deadline")])
def test_the_time_left_is_for_an_export_too(export: float, reason: str, tmp_path: Path) -> None:
    """Twice the longest one."""
    context = context_of(tmp_path)
    stopper = Stopper(context)
    write_json(context.attempt.deadline, {"end": time.time() + 100})
    stopper.saved(1.0)
    stopper.exported(export)
    stopper.exported(0.0)
    assert stopper.agree() == (reason, False)


@pytest.mark.usefixtures("alone")
def test_the_time_that_a_job_is_suspended_is_no_step_s(tmp_path: Path) -> None:
    """An hour, while a minute is left."""
    context, pauses, now = context_of(tmp_path), Pauses(), [0.0]
    stopper = Stopper(context, clock=lambda: now[0], pauses=pauses)
    write_json(context.attempt.deadline, {"end": time.time() + 60})
    stopper.saved(1.0)
    stopper.begin()
    now[0] += 3600
    pauses.seconds += 3600
    stopper.stepped()
    assert stopper.agree() == ("none", False)


@pytest.mark.usefixtures("alone")
def test_an_end_from_before_a_suspension_stops_no_rank(tmp_path: Path) -> None:
    """The launcher reports the new one in a moment."""
    context, pauses = context_of(tmp_path), Pauses()
    stopper = Stopper(context, pauses=pauses)
    write_json(context.attempt.deadline, {"end": time.time() - 100})
    stopper.saved(1.0)
    pauses.ended = time.monotonic()
    assert stopper.agree() == ("none", False)
    pauses.ended = time.monotonic() - 60
    assert stopper.agree() == ("deadline", False)
