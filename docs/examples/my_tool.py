"""A tool of one's own: the policy may have a sum worked out."""

from __future__ import annotations


def calculate(numbers: list[float], operation: str = "add", digits: int = 6) -> str:
    """
    Add or multiply numbers.

    Args:
        numbers: The numbers.
        operation: What to do with them. (choices: ["add", "multiply"])
        digits: Digits after the point.
    """
    result = 0.0 if operation == "add" else 1.0
    for number in numbers:
        result = result + number if operation == "add" else result * number
    return f"{result:.{digits}f}"
