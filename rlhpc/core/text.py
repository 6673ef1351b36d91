"""Makes text safe to print on a terminal."""

from __future__ import annotations

import re

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all but tab and newline


def printable(text: str) -> str:
    """The text with control characters replaced: with them, a response could take over a terminal."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)
