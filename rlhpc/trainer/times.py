"""Measures how long a run's start and its checkpoints take, for ``rlhpc plan calibrate``."""

from __future__ import annotations

import time
from dataclasses import replace

import torch
import torch.distributed as dist

from rlhpc.core.attempts import AttemptTimes, read_attempt, write_times
from rlhpc.core.context import RankContext
from rlhpc.core.shown import ShownOnly
from rlhpc.trainer.roles import Models


class RunTimer:
    """Seconds of this attempt, of the slowest rank; the first rank writes them."""

    def __init__(self, context: RankContext, models: Models) -> None:
        """Begins when the models are loaded, before a checkpoint is read."""
        self._context, self._models = context, models
        self._reading = models.read_seconds
        self._times: AttemptTimes | None = None
        self._guard = ShownOnly("the times of start and checkpoints")

    def started(self) -> None:
        """Records that the first step may begin. Collective: two numbers in CPU memory."""
        reading = torch.tensor([self._reading, self._models.read_seconds - self._reading], dtype=torch.float64)
        dist.all_reduce(reading, dist.ReduceOp.MAX)
        if self._context.info.rank:
            return
        models, resume = reading.tolist()
        with self._guard:
            attempt = read_attempt(self._context.attempt)
            if attempt is not None:
                start = max(0.0, time.time() - attempt.started - models - resume)
                self._write(AttemptTimes(start, models, resume or None))

    def saved(self, seconds: float) -> None:
        """Records a checkpoint that training waited for."""
        if self._times is not None:
            with self._guard:
                self._write(replace(self._times, saves=(*self._times.saves, seconds)))

    def _write(self, times: AttemptTimes) -> None:
        self._times = times
        write_times(self._context.attempt, times)
