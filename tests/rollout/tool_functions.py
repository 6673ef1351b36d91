"""Tools for the tests: one that answers, and every way of going wrong."""

from __future__ import annotations

import os
import time


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
