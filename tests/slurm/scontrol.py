"""Reading what Slurm's commands print, and waiting for it to say something."""

from __future__ import annotations

import re
from collections.abc import Callable

from tests.helpers.waiting import PATIENCE, until

FINISHED = frozenset(
    {"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "TIMEOUT"}
)

NAME = r"[A-Za-z][\w/:]*"  # as in NtasksPerN:B:S:C


def parse_job(line: str) -> dict[str, str]:
    """One line of ``scontrol show job -o``, by name. Values may hold spaces."""
    pairs = re.findall(rf"(?:^|\s)({NAME})=(.*?)(?=\s+{NAME}=|\s*$)", line.strip())
    return dict(pairs)


def wait(
    done: Callable[[], object],
    what: str,
    detail: Callable[[], str] = str,
    timeout: float = PATIENCE,
    interval: float = 0.05,
) -> None:
    """``until``, less often: most conditions run a command of Slurm."""
    until(done, what, detail, seconds=timeout, interval=interval)
