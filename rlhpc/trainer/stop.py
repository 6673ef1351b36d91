"""Stops on a signal or shortly before the job's time limit, and saves by time. All ranks agree, between two
steps."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Protocol

import torch
import torch.distributed as dist

from rlhpc.core.context import REASONS, RankContext, Reason
from rlhpc.core.files import read_json
from rlhpc.core.process import Pauses
from rlhpc.core.storage import NONE

# A save or a step may take longer than before; the rest is for the exit and for clock skew between machines.
_SAVE_FACTOR, _STEP_FACTOR, _REST_SECONDS = 2.0, 1.5, 8.0
_RECENT_STEPS = 10


class Rider(Protocol):
    """A number that goes to all ranks with the reason to stop."""

    def asked(self) -> int:
        """This rank's number, not negative."""

    def take(self, number: int) -> None:
        """Receives the maximum over all ranks."""


class Stopper:
    """Records how long steps and saves take, and decides after each step whether the run continues.

    ``every_seconds``: interval between checkpoints, None without one in time. ``due``: whether one is due by it after
    the present step, the same on every rank: the first rank's ``clock`` decides. ``pauses``: of this process.
    """

    def __init__(
        self,
        context: RankContext,
        rider: Rider | None = None,
        *,
        every_seconds: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        pauses: Pauses | None = None,
    ) -> None:
        self._context, self._rider, self._every, self._clock = context, rider, every_seconds, clock
        self._checkpoint_at, self.due = clock(), False
        self._steps: list[float] = []
        self._save: float | None = None
        self._export = 0.0
        self._pauses, self._paused = pauses or Pauses(), 0.0
        self._last = clock()
        self._known_end: float | None = None

    def saved(self, seconds: float) -> None:
        """Records the time of a checkpoint."""
        self._save = max(self._save or 0.0, seconds)

    def checkpointed(self) -> None:
        """Records that the present step is saved, or being saved in the background."""
        self._checkpoint_at = self._clock()

    def exported(self, seconds: float) -> None:
        """Records the time of an export, which may follow the next save."""
        self._export = max(self._export, seconds)

    def stepped(self) -> None:
        """Records the end of a step and its validation, without the time in which the job was suspended."""
        seconds = self._clock() - self._last - (self._pauses.seconds - self._paused)
        self._steps = [*self._steps[1 - _RECENT_STEPS :], seconds]

    def begin(self) -> None:
        """Records the start of a step, after a save."""
        self._last, self._paused = self._clock(), self._pauses.seconds

    def agree(self, end_seconds: float = 0.0) -> tuple[Reason, bool]:
        """The reason to stop now, and whether to save, in order to measure a save or because an alert asks for it; the
        same on every rank. ``end_seconds``: that an end after the next step takes beside a save, known on rank 0.

        Collective: four numbers, in CPU memory.
        """
        reason, end = self._context.stop.reason, self._end() if self._context.info.rank == 0 else None
        if self._pauses.just_ended:  # Slurm moves the end of a job that it has suspended, and the launcher reports it
            end = None
        if reason == "none" and end is not None and self._is_too_late(end - _STEP_FACTOR * end_seconds):
            reason = "deadline"
        saves = self._context.stop.saves or (end is not None and self._save is None)
        self._context.stop.saves = False
        asked = self._rider.asked() if self._rider is not None else 0
        due = self._context.info.rank == 0 and self._is_due()
        codes = torch.tensor([REASONS.index(reason), int(saves), int(due), asked])
        dist.all_reduce(codes, dist.ReduceOp.MAX)
        reason_code, save, due_by_time, asked = codes.tolist()
        self.due = bool(due_by_time)
        if self._rider is not None:
            self._rider.take(asked)
        return REASONS[reason_code], bool(save)

    def _is_due(self) -> bool:
        return self._every is not None and self._clock() - self._checkpoint_at >= self._every

    def _end(self) -> float | None:
        """Time at which Slurm ends the job, as last read, without waiting; None without a limit."""
        with contextlib.suppress(OSError):
            self._known_end = float(read_json(self._context.attempt.deadline, NONE)["end"])
        return self._known_end

    def _is_too_late(self, end: float) -> bool:
        """True if another step, a save and its export would exceed the limit."""
        step = _STEP_FACTOR * max(self._steps, default=0.0)
        save = _SAVE_FACTOR * ((self._save or 0.0) + self._export)
        return time.time() + step + save + _REST_SECONDS > end
