"""A limit of CPU time on code of others, raised between two instructions of the interpreter."""

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
    exceeded = False

    def watch() -> None:
        nonlocal exceeded
        left = seconds
        while not done.wait(left):
            with lock:
                if done.is_set():
                    return
                left = limit - time.clock_gettime(clock)
                if left <= 0:
                    exceeded = True
                    _raise_in(thread)
                    return

    threading.Thread(target=watch, name="cpu-limit", daemon=True).start()
    try:
        yield
    finally:
        with lock:
            done.set()
            if exceeded:
                _catch(thread)


def _raise_in(thread: int) -> None:
    """Raises CpuTimeExceeded in a thread at its next instruction."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(CpuTimeExceeded))


def _catch(thread: int) -> None:
    """Catches what may not have been raised yet in this thread.

    Only an exception that is raised clears the interpreter's flag. One that is withdrawn, with NULL, leaves it set:
    each call is slower then, and one under a profiler or debugger never starts (CPython 3.11, Python/ceval.c).
    """
    try:
        _raise_in(thread)
        while True:
            pass
    except CpuTimeExceeded:
        pass
