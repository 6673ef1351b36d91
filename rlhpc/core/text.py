"""Text for a terminal."""

from __future__ import annotations

import re

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all but tab and newline


def printable(text: str) -> str:
    """The text with control characters replaced: with them, a response could take over a terminal."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


def duration(seconds: float) -> str:
    """42 s, 3 min 07 s, 2 h 05 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
