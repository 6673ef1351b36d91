"""Measures for how long this process was suspended, as by Slurm for a job that takes turns with another one."""

from __future__ import annotations

import threading
import time

_TICK_SECONDS, _LATE_SECONDS = 1.0, 5.0
_CPU_SHARE = 0.1  # a thread that is late while the process computes only waits for the interpreter
_AFTER_SECONDS = 30.0


class Pauses:
    """Watches the clock in a thread. ``seconds``: suspended so far."""

    def __init__(self) -> None:
        self.seconds, self._ended = 0.0, float("-inf")
        threading.Thread(target=self._watch, name="pauses", daemon=True).start()

    @property
    def just_ended(self) -> bool:
        """Whether a pause ended in the last half minute, so that times of before may not hold."""
        return time.monotonic() - self._ended < _AFTER_SECONDS

    def _watch(self) -> None:
        while True:
            began, cpu = time.monotonic(), time.process_time()
            time.sleep(_TICK_SECONDS)
            late = time.monotonic() - began - _TICK_SECONDS
            if late > _LATE_SECONDS and time.process_time() - cpu < _CPU_SHARE * late:
                self.seconds, self._ended = self.seconds + late, time.monotonic()
