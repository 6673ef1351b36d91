"""Reading what Slurm's commands print, and waiting for it to say something."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

FINISHED = frozenset(
    {"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "TIMEOUT"}
)

NAME = r"[A-Za-z][\w/:]*"  # as in NtasksPerN:B:S:C


def parse_job(line: str) -> dict[str, str]:
    """One line of ``scontrol show job -o``, by name. Values may hold spaces."""
    pairs = re.findall(rf"(?:^|\s)({NAME})=(.*?)(?=\s+{NAME}=|\s*$)", line.strip())
    return dict(pairs)


def wait(
    done: Callable[[], bool], timeout: float, what: str, detail: Callable[[], str] = str, interval: float = 0.05
) -> None:
    """Poll until ``done()``; AssertionError naming ``what`` after ``timeout`` seconds."""
    deadline = time.monotonic() + timeout
    while not done():
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {timeout:.0f} s for {what}\n{detail()}")
        time.sleep(interval)
