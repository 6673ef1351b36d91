"""CPU time that the observers of all ranks take, over the CPU time of the ranks."""

from __future__ import annotations

import math
import time

from rlhpc.core.process import take_observing_seconds
from rlhpc.observe.rank_numbers import Gathered
from rlhpc.parallel.waits import measured_calls, overhead

_OBSERVERS, _RANK = "cpu of observers", "cpu of the rank"


class OwnCost:
    """Contributes the CPU seconds since its last call: of this rank's observers, and of its whole process."""

    def __init__(self) -> None:
        self._overhead = overhead()
        self._calls, self._process = measured_calls(), time.process_time()

    def __call__(self) -> dict[str, float]:
        calls, process = measured_calls(), time.process_time()
        found = {
            _OBSERVERS: take_observing_seconds() + (calls - self._calls) * self._overhead,
            _RANK: process - self._process,
        }
        self._calls, self._process = calls, process
        return found


def own_cost_metrics(gathered: Gathered) -> dict[str, float]:
    """``observe/cpu_seconds`` of all ranks' observers since the step before, and their share of the ranks' CPU time."""
    observers, ranks = (
        sum(value for value in gathered.column(name) if not math.isnan(value)) for name in (_OBSERVERS, _RANK)
    )
    return {"observe/cpu_seconds": observers, "observe/cpu_share": observers / ranks if ranks else 0.0}
