"""Writes timeline.jsonl, which keeps the newest steps."""

from __future__ import annotations

import time
from pathlib import Path

from rlhpc.api import RunState
from rlhpc.core.files import LineFile, write_atomic
from rlhpc.core.spans import StepTimeline, read_timelines

KEPT_STEPS = 200  # newest steps: a slow rank is looked for in these, and metrics.jsonl has numbers of all steps
_MOST_BYTES = 64 * 2**20
_WRITE_SECONDS = 2.0  # between two writes, at least: short steps are written together


class TimelineFile:
    """Appends one line per step, those of short steps together. Beyond twice the ``steps`` to keep, or 64 MiB, older
    ones are removed."""

    def __init__(self, path: Path, state: RunState, steps: int = KEPT_STEPS) -> None:
        """Removes steps beyond ``state``, which a resumed run repeats."""
        self._path, self._steps, self._written = path, steps, time.monotonic()
        self._unwritten: list[str] = []
        self._lines = [
            known.line()
            for known in read_timelines(path)
            if known.step <= (state.sft_step if known.phase == "sft" else state.step)
        ]
        self._rewrite()

    def add(self, timeline: StepTimeline) -> None:
        """Appends a step."""
        line = timeline.line()
        self._lines.append(line)
        self._bytes += len(line)
        self._unwritten.append(line)
        if time.monotonic() - self._written >= _WRITE_SECONDS:
            self.write()

    def write(self) -> None:
        """Writes the steps that are not written yet."""
        self._written = time.monotonic()
        if len(self._lines) > 2 * self._steps or self._bytes > _MOST_BYTES:
            self._rewrite()
        elif self._unwritten:
            self._file.append("".join(self._unwritten))
            self._unwritten = []

    def _rewrite(self) -> None:
        """Keeps the newest lines, in half of the space at most."""
        kept, size = [], 0
        for line in reversed(self._lines[-self._steps :]):
            size += len(line)
            if size > _MOST_BYTES // 2:
                break
            kept.append(line)
        self._lines = kept[::-1]
        self._bytes = sum(map(len, self._lines))
        if self._lines or self._path.exists():
            write_atomic(self._path, "".join(self._lines))
        self._file, self._unwritten = LineFile(self._path), []
