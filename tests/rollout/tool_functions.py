"""Tools for the tests: one that answers, and every way of going wrong."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any


def add(a: int, b: int, places: int = 0) -> str:
    """
    Add two numbers.

    Args:
        a: One of them.
        b: The other.
        places: Zeros after the sum.
    """
    return str(a + b) + "0" * places


def reach(host: str) -> str:
    """
    Never comes.

    Args:
        host: Whom to ask.
    """
    raise ConnectionError(f"{host} is not there")


def wait(seconds: float) -> dict[str, float]:
    """
    Wait.

    Args:
        seconds: How long.
    """
    time.sleep(seconds)
    return {"waited": seconds}


def talk(words: int) -> str:
    """
    Say much.

    Args:
        words: How many.
    """
    return "1 " * words


def die() -> str:
    """Ends its process."""
    os._exit(3)


def untold(a, b):
    """Says nothing of its parameters."""


class Counter:
    """Of a conversation. Its file gets a line for each one that is made or closed."""

    def __init__(self, file: str = "", extra_info: dict[str, Any] | None = None) -> None:
        self.count, self.file = (extra_info or {}).get("start", 0), file
        self._note("made")

    def __call__(self) -> str:
        """Counts one further."""
        self.count += 1
        return str(self.count)

    def leap(self, steps: int, seconds: float = 0.0) -> str:
        """
        Counts several, if that is no secret.

        Args:
            steps: How many.
            seconds: How long it takes.
        """
        time.sleep(seconds)
        self.count += steps
        if steps < 0:
            raise ValueError("backwards")
        return str(self.count)

    def close(self) -> None:
        self._note(f"closed at {self.count}")

    def _note(self, what: str) -> None:
        if self.file:
            with Path(self.file).open("a") as lines:
                lines.write(f"{what}\n")


class Silent:
    """Cannot be called."""
