"""Processes of a sandbox: each ends with the one that started it."""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections.abc import Callable
from typing import NoReturn

from rlhpc.rewards import kernel


def fork(outbox: int, be: Callable[[int], NoReturn]) -> int:
    """Forks a process that runs ``be`` with its lifeline: a pipe that ends with this process."""
    lifeline, held = os.pipe()
    child = os.fork()
    if child:
        os.close(lifeline)
        return child
    try:
        os.close(held)
        be(lifeline)
    except BaseException as error:
        send(outbox, f"E{error}")
    finally:
        os._exit(1)


def end_with_parent(lifeline: int) -> None:
    """Makes this process end with its parent, also if that one has already ended. Its id would not show that: the
    parent of a namespace's first process is outside."""
    kernel.die_with_parent()
    if readable(lifeline, time.monotonic()):
        os._exit(1)


def readable(pipe: int, deadline: float, stop: int | None = None) -> bool:
    """Whether a pipe has a message, or has ended, before the deadline and before ``stop``, another pipe, has ended."""
    waiting = [pipe] if stop is None else [pipe, stop]
    return pipe in select.select(waiting, [], [], max(0.0, deadline - time.monotonic()))[0]


def threads(process: int) -> int:
    with contextlib.suppress(OSError):
        return len(os.listdir(f"/proc/{process}/task"))
    return 0


def send(outbox: int, message: str) -> None:
    os.write(outbox, message.encode()[:2000] + b"\n")


def close_all_but(needed: set[int]) -> None:
    for descriptor in map(int, os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else range(256):
        if descriptor not in needed:
            with contextlib.suppress(OSError):
                os.close(descriptor)
