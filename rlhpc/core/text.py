"""Text for a terminal."""

from __future__ import annotations

import re

# All but tab and newline, and what reorders the letters around it.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def printable(text: str) -> str:
    """The text with control characters replaced: with them, a response could take over a terminal."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


def log_text(text: str) -> str:
    """Printable text of a log: without colours, and with a line for each state of a progress bar."""
    return printable(_COLOUR.sub("", text).replace("\r\n", "\n").replace("\r", "\n"))


def duration(seconds: float) -> str:
    """42 s, 3 min 07 s, 2 h 05 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
