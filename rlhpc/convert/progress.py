"""Progress of a conversion: bytes written, rate, time left, in words."""

from __future__ import annotations

import time
from typing import TextIO

from rlhpc.core.shown import show

_EVERY = {True: 0.2, False: 10.0}  # seconds between lines; on a terminal one line is overwritten


class Progress:
    """Receives the progress of a conversion; this one shows nothing."""

    def update(self, done: int, total: int) -> None:
        """Bytes written so far in this run, and to be written in all."""

    def note(self, text: str) -> None:
        """A remark for the user."""


SILENT = Progress()


class ProgressLine(Progress):
    """``Progress`` on a terminal or in a log."""

    def __init__(self, out: TextIO) -> None:
        self._out, self._terminal = out, out.isatty()
        self._began, self._last, self._open = time.monotonic(), 0.0, False
        self._done = 0

    def update(self, done: int, total: int) -> None:
        """Shows bytes written and their total, not more often than is readable."""
        now = time.monotonic()
        if not done:
            self._began = now
        self._done = done
        if not done or (now - self._last < _EVERY[self._terminal] and done < total):
            return
        self._last = now
        rate = done / max(now - self._began, 1e-9)
        left = f"{time_text((total - done) / rate)} left" if done < total else "finishing"
        self._write(f"{done / total:4.0%} | {size_text(done)} of {size_text(total)} | {size_text(rate)}/s | {left}")

    def note(self, text: str) -> None:
        """Shows a line that is not overwritten."""
        self.end()
        show(text, file=self._out)

    def end(self) -> None:
        """Ends the overwritten line."""
        if self._open:
            show("", file=self._out)
        self._open = False

    def summary(self) -> str:
        """Time and rate of the whole conversion, the last flush to disk included."""
        seconds = max(time.monotonic() - self._began, 1e-9)
        return f"{seconds:,.1f} s, {size_text(self._done / seconds)}/s"

    def _write(self, text: str) -> None:
        if self._terminal:
            show(text, start="\r\x1b[K", end="", file=self._out)
            self._open = True
        else:
            show(text, file=self._out)


def size_text(count: float) -> str:
    """Bytes in the largest unit that leaves a digit before the point."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.4g} {unit}"
        count /= 1000
    return f"{count:.4g} TB" if count < 1000 else f"{count:,.0f} TB"


def time_text(seconds: float) -> str:
    """Time in its largest unit, with at least two digits from a minute on."""
    if seconds < 120:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:,.1f} h"
