"""When to stop: asked by a signal, or because the job's time is nearly over. Agreed by all ranks, between two steps."""

from __future__ import annotations

import contextlib
import time

import torch
import torch.distributed as dist

from rlhpc.core.context import RankContext
from rlhpc.core.files import read_json
from rlhpc.core.stop import REASONS, Reason
from rlhpc.core.storage import NONE

# A save and a step may take longer than they have; the rest is for leaving and for the clocks of two machines.
_SAVE_FACTOR, _STEP_FACTOR, _REST_SECONDS = 2.0, 1.5, 8.0
_RECENT_STEPS = 10


class Stopper:
    """Keeps the time that steps and saves take, and answers after each step whether the run goes on."""

    def __init__(self, context: RankContext) -> None:
        self._context = context
        self._steps: list[float] = []
        self._save: float | None = None
        self._last = time.monotonic()
        self._known_end: float | None = None

    def saved(self, seconds: float) -> None:
        """A checkpoint took so long."""
        self._save = max(self._save or 0.0, seconds)

    def stepped(self) -> None:
        """A step has ended, its validation with it."""
        now = time.monotonic()
        self._steps = [*self._steps[1 - _RECENT_STEPS :], now - self._last]

    def begin(self) -> None:
        """The next step begins: what was saved before it is not a part of it."""
        self._last = time.monotonic()

    def agree(self) -> tuple[Reason, bool]:
        """Why the run should stop now, and whether to save so that the time of a save is known; the same on every rank.

        Collective, two numbers on the host.
        """
        reason, end = self._context.stop.reason, self._end() if self._context.info.rank == 0 else None
        if reason == "none" and end is not None and self._is_too_late(end):
            reason = "deadline"
        codes = torch.tensor([REASONS.index(reason), int(end is not None and self._save is None)])
        dist.all_reduce(codes, dist.ReduceOp.MAX)
        return REASONS[int(codes[0])], bool(codes[1])

    def _end(self) -> float | None:
        """When Slurm ends the job, as last read; None without a limit. Read after each step, so no wait is needed."""
        with contextlib.suppress(OSError):
            self._known_end = float(read_json(self._context.attempt.deadline, NONE)["end"])
        return self._known_end

    def _is_too_late(self, end: float) -> bool:
        """Another step and a save after it would not fit."""
        step = _STEP_FACTOR * max(self._steps, default=0.0)
        return time.time() + step + _SAVE_FACTOR * (self._save or 0.0) + _REST_SECONDS > end
