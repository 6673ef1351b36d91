"""What a supervisor sees of srun while ranks run: their records of exit, and its output."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import IO

from rlhpc.core import exits
from rlhpc.core.shown import show

_LOOK_SECONDS = 5.0  # between looks for exit records


class RanksDone:
    """Measures for how long all ranks of a part have been done while srun runs."""

    def __init__(self, records: Path, ranks: range) -> None:
        self._records, self._ranks = records, ranks
        self._looked, self._since = time.monotonic(), float("inf")

    def seconds(self) -> float:
        now = time.monotonic()
        if self._since == float("inf") and now - self._looked > _LOOK_SECONDS:
            self._looked = now
            if exits.all_ended(self._records, self._ranks):
                self._since = now
        return max(0.0, now - self._since)


def copy_output(source: IO[str], printed: list[str]) -> None:
    """Copies srun's output to our own log and to ``printed``."""
    for line in source:
        printed.append(line)
        show(line, end="", file=sys.stderr)
