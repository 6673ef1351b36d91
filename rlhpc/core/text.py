"""Text of others on a terminal."""

from __future__ import annotations

import re

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all but tab and newline


def printable(text: str) -> str:
    """The text with a sign in place of each control character, by which a response could take over a terminal."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)
