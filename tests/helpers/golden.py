"""Compares with files under tests/golden; a failure shows the difference and how to accept it."""

from __future__ import annotations

import difflib
import json
from pathlib import Path

import pytest

GOLDEN = Path(__file__).parents[1] / "golden"


def check_text(name: str, found: str, accept: bool) -> None:
    """Compare a text with a file, character by character."""
    file = GOLDEN / name
    if accept:
        file.write_text(found)
        return
    expected = file.read_text() if file.exists() else ""
    if expected != found:
        lines = difflib.unified_diff(
            expected.splitlines(), found.splitlines(), f"tests/golden/{name}", "computed", lineterm=""
        )
        pytest.fail("\n".join([*lines, "If intended: pytest --accept-golden, and give the reason."]), pytrace=False)


def check_numbers(name: str, found: dict[str, list[float]], relative: float, accept: bool) -> None:
    """Compare named series of numbers with a JSON file, each number within ``relative`` of the stored one."""
    file = GOLDEN / name
    if accept:
        file.write_text(_text(found))
        return
    expected = json.loads(file.read_text())
    same = expected.keys() == found.keys() and all(
        len(found[key]) == len(expected[key]) and found[key] == pytest.approx(expected[key], rel=relative)
        for key in expected
    )
    if not same:
        lines = difflib.unified_diff(
            _text(expected).splitlines(), _text(found).splitlines(), f"tests/golden/{name}", "computed", lineterm=""
        )
        pytest.fail(
            "\n".join([*lines, f"beyond {relative:g}. If intended: pytest --accept-golden, and give the reason."]),
            pytrace=False,
        )


def _text(series: dict[str, list[float]]) -> str:
    return json.dumps(series, indent=1) + "\n"
