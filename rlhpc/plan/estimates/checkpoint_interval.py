"""The interval between checkpoints that loses least time, by Young and Daly: sqrt(2 x save x time between failures)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, isfinite, sqrt
from statistics import median

from rlhpc.config.schema import RunConfig


@dataclass(frozen=True)
class CheckpointInterval:
    """Seconds. ``best``: the interval that loses least; ``save``: for which training waits, ``measured`` or predicted;
    ``mtbf``: mean time between failures of all nodes; ``configured``: the interval as configured, None without any."""

    best: float
    save: float
    measured: bool
    mtbf: float
    configured: float | None

    def loss(self, interval: float) -> float:
        """Returns the share of the time that saves take and failures repeat, half an interval each on average."""
        return self.save / interval + interval / (2 * self.mtbf)


def recommend_interval(
    config: RunConfig, nodes: int, step: float, *, save: float, write: float, measured: Sequence[float] = ()
) -> CheckpointInterval:
    """Returns the best interval for ``planning.node_mtbf_hours``.

    ``step``, ``save`` and ``write``: predicted seconds of a step, of a save for which training waits, and until it is
    written; ``measured``: seconds of saves until they were written, of earlier attempts.
    """
    mtbf = 3600 * config.planning.node_mtbf_hours / nodes
    taken = bool(measured) and not config.checkpoint.asynchronous
    cost = median(measured) if taken else save
    shortest = write if config.checkpoint.asynchronous else 0.0  # the next one waits for the one before
    every = steps_between(config, step)
    return CheckpointInterval(max(sqrt(2 * cost * mtbf), shortest), cost, taken, mtbf, every * step if every else None)


def steps_between(config: RunConfig, step: float) -> int:
    """Returns the steps from one checkpoint to the next, by number or by time; 0 for none."""
    every, minutes = config.checkpoint.every, config.checkpoint.every_minutes
    if minutes is None or not step or not isfinite(step):
        return every
    by_time = max(1, ceil(60 * minutes / step))
    return min(every, by_time) if every else by_time
