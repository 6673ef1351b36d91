"""Time that this rank waits in collectives while a phase of a step runs (rlhpc.core.spans), transfers included.

On gloo the caller blocks. On NCCL its stream does: events before and after each call measure for how long, and are
read at the end of the phase, when the device has finished its work. Of a call that blocks the caller and its stream,
the longer time counts. Communication that overlaps with computation is no wait.

Not seen: collectives that bypass torch.distributed, such as those of an engine's tensor-parallel ranks in CUDA graphs.
"""

from __future__ import annotations

import functools
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from rlhpc.core import spans
from rlhpc.core.shown import ShownOnly
from rlhpc.parallel.compat import time_collectives

_LOOK = 256  # calls between two looks at which events have passed


_thread = threading.local()


def leave_out_this_thread() -> None:
    """Counts no waits of the calling thread from now on: it works beside the phases, which do not wait for it."""
    _thread.in_background = True


class _Recorder:
    """Measures calls. ``overhead``: CPU seconds that measuring a call takes; ``calls``: how many were measured."""

    def __init__(self, *, on_gpu: bool) -> None:
        self._on_gpu, self._guard = on_gpu, ShownOnly("the times that ranks wait for each other")
        self._free: list[Any] = []
        self._pending: deque[tuple[float, Any, Any]] = deque()
        self.calls = 0

    def measured(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """``call``, measured while a phase runs."""

        @functools.wraps(call)
        def run(*arguments: Any, **options: Any) -> Any:
            if not spans.counts_waits() or self._guard.failed or getattr(_thread, "in_background", False):
                return call(*arguments, **options)
            before = self._event() if self._on_gpu else None
            began = time.perf_counter()
            try:
                return call(*arguments, **options)
            finally:
                seconds = time.perf_counter() - began
                self.calls += 1
                if before is None:
                    spans.waited(seconds)
                else:
                    self._pending.append((seconds, before, self._event()))
                    if self.calls % _LOOK == 0:
                        self.settle(wait=False)

        return run

    def settle(self, *, wait: bool) -> None:
        """Counts calls by their events; without ``wait`` those that the device has passed."""
        with self._guard:
            while self._pending:
                seconds, before, after = self._pending[0]
                if after is not None:
                    if not wait and not after.query():
                        return
                    after.synchronize()
                    spans.waited(max(seconds, before.elapsed_time(after) / 1000))
                    self._free += (before, after)
                self._pending.popleft()
        if self._guard.failed:
            self._pending.clear()

    def _event(self) -> Any:
        """An event of the caller's stream, recorded now; None if that fails."""
        with self._guard:
            event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
            event.record()
            return event
        return None


_recorder: _Recorder | None = None


def measure_waits() -> None:
    """Measures from now on, in the whole process."""
    global _recorder
    if _recorder is None:
        _recorder = _Recorder(on_gpu=torch.cuda.is_available())
        time_collectives(_recorder.measured)


def settle_waits() -> None:
    """Counts all waits of the phase that ends. Called when the device has finished its work."""
    if _recorder is not None:
        _recorder.settle(wait=True)


def measured_calls() -> int:
    """Number of calls measured so far."""
    return _recorder.calls if _recorder is not None else 0


def overhead() -> float:
    """CPU seconds that measuring one call takes on this machine."""
    count, recorder = 1000, _Recorder(on_gpu=False)
    run = recorder.measured(int)
    spans.enter("overhead")
    began = time.thread_time()
    for _ in range(count):
        run()
    seconds = time.thread_time() - began
    spans.forget()
    return seconds / count
