"""Limits the CPU time of Python code that others have written."""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections.abc import Iterator


class CpuTimeExceeded(BaseException):
    """Raised inside the limited code, which therefore must not catch it as an Exception."""


@contextlib.contextmanager
def cpu_limit(seconds: float) -> Iterator[None]:
    """Raises CpuTimeExceeded in the block when its thread has used ``seconds`` of CPU time, between two instructions of
    the interpreter: a call of native code ends first."""
    thread = threading.get_ident()
    clock = time.pthread_getcpuclockid(thread)
    limit = time.clock_gettime(clock) + seconds
    lock, done = threading.Lock(), threading.Event()

    def watch() -> None:
        left = seconds
        while not done.wait(left):
            with lock:
                if done.is_set():
                    return
                left = limit - time.clock_gettime(clock)
                if left <= 0:
                    _raise_in(thread, CpuTimeExceeded)
                    return

    threading.Thread(target=watch, name="cpu-limit", daemon=True).start()
    try:
        yield
    finally:
        with lock:
            done.set()
            _raise_in(thread, None)  # what has not been raised yet


def _raise_in(thread: int, error: type[BaseException] | None) -> None:
    """Raises ``error`` in a thread at its next instruction; None withdraws one that is pending."""
    raised = ctypes.py_object(error) if error is not None else None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), raised)
