"""Code that does not end is interrupted, in any thread, and nothing is raised after the block."""

from __future__ import annotations

import contextlib
import sys
import threading
import time

import pytest

from rlhpc.data.cpu_limit import CpuTimeExceeded, cpu_limit


def _endless() -> None:
    with cpu_limit(0.05):
        while True:
            with contextlib.suppress(Exception):  # as a template may
                sum(range(10))


def test_a_loop_is_interrupted() -> None:
    with pytest.raises(CpuTimeExceeded):
        _endless()


def test_a_loop_is_interrupted_in_another_thread() -> None:
    met: list[str] = []

    def run() -> None:
        try:
            _endless()
        except CpuTimeExceeded:
            met.append("exceeded")

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    assert met == ["exceeded"]


def test_time_in_which_the_thread_does_not_run_is_not_counted() -> None:
    with cpu_limit(0.05):
        time.sleep(0.2)


def test_a_block_that_ends_just_in_time_raises_nothing_later() -> None:
    for _ in range(20):
        try:
            with cpu_limit(0.002):
                end = time.thread_time() + 0.002
                while time.thread_time() < end:
                    pass
        except CpuTimeExceeded:
            continue
    for _ in range(1000):
        pass


@pytest.mark.parametrize("seconds", [10.0, 0.001])
def test_functions_can_be_profiled_afterwards(seconds: float) -> None:
    """With the interpreter's flag left set, the first profiled call never ends."""
    with contextlib.suppress(CpuTimeExceeded), cpu_limit(seconds):
        for _ in range(10**5):
            pass

    def run() -> None:
        sys.setprofile(lambda *_: None)
        (lambda: None)()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()
