"""How far a conversion is, how fast, and how long it will take."""

from __future__ import annotations

import time
from typing import TextIO

from rlhpc.core.shown import show

_EVERY = {True: 0.2, False: 10.0}  # seconds between lines: on a terminal one line is written over


class ProgressLine:
    def __init__(self, out: TextIO) -> None:
        self._out, self._terminal = out, out.isatty()
        self._began, self._last, self._open = time.monotonic(), 0.0, False
        self._done = 0

    def show(self, done: int, total: int) -> None:
        """Bytes written, of all."""
        now = time.monotonic()
        if not done:
            self._began = now
        self._done = done
        if not done or (now - self._last < _EVERY[self._terminal] and done < total):
            return
        self._last = now
        rate = done / max(now - self._began, 1e-9)
        text = (
            f"{done / 1e9:,.2f} of {total / 1e9:,.2f} GB | {rate / 1e9:.2f} GB/s | {(total - done) / rate:,.0f} s left"
        )
        self._write(text)

    def tell(self, text: str) -> None:
        """A line that stays."""
        self.end()
        show(text, file=self._out)

    def end(self) -> None:
        """Leave the line."""
        if self._open:
            show("", file=self._out)
        self._open = False

    def summary(self) -> str:
        """Of the whole time, the last flush to disk too."""
        seconds = max(time.monotonic() - self._began, 1e-9)
        return f"{seconds:,.1f} s, {self._done / seconds / 1e9:.2f} GB/s"

    def _write(self, text: str) -> None:
        if self._terminal:
            show(f"\r\x1b[K{text}", end="", file=self._out)
            self._open = True
        else:
            show(text, file=self._out)
