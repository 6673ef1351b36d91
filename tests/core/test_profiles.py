"""Which steps and ranks a profile is of: as text, as numbers for a collective, as a file."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from rlhpc import trainer
from rlhpc.core.errors import UserError
from rlhpc.core.folder import RunFolder
from rlhpc.core.profiles import (
    MOST_RANGES,
    NOTHING,
    PHASES,
    TOOLS,
    Range,
    Selection,
    from_json,
    from_numbers,
    new_request,
    parse_ranges,
    parse_steps,
    read_request,
    write_request,
)

EVERYTHING = Selection(7, 9, tuple(Range(i, 10 * i + 1, i + 1) for i in range(MOST_RANGES)), PHASES, TOOLS)
CASES = [Selection(1, 1), EVERYTHING, Selection(40, 42, (Range(3, 3), Range(8, 15)), ("update",), ("py-spy", "torch"))]


@pytest.mark.parametrize("selection", CASES, ids=["least", "most", "some"])
def test_numbers_and_json_keep_everything(selection: Selection) -> None:
    numbers = selection.as_numbers()
    assert len(numbers) == len(NOTHING)
    assert min(numbers) >= 0
    found = from_numbers(numbers)
    assert found is not None
    assert (found.first, found.last, found.ranks, found.phases) == (
        selection.first,
        selection.last,
        selection.ranks,
        selection.phases,
    )
    assert set(found.tools) == set(selection.tools)
    assert from_json(json.loads(json.dumps(selection.as_json()))) == selection


@pytest.mark.parametrize(
    "change",
    [
        {"first": 0},
        {"first": -1},
        {"first": 3},
        {"last": 10**12},
        {"last": float("inf")},
        {"ranks": []},
        {"ranks": list(range(MOST_RANGES + 1))},
        {"ranks": 3},
        {"ranks": ["0-1:0"]},
        {"tools": []},
        {"tools": ["gdb"]},
        {"phases": "update"},
        {"phases": None},
    ],
    ids=str,
)
def test_a_file_of_another_shape_is_no_request(change: dict[str, object]) -> None:
    """All ranks expect as many numbers, with any contents of the file of a request."""
    value = {**Selection(1, 2).as_json(), **change}
    with pytest.raises(ValueError, match=r"no profile|ranks|tools|phases|invalid"):
        from_json(value)


def test_no_request_has_no_numbers() -> None:
    assert from_numbers(NOTHING) is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("40", (40, 40, False)),
        ("40-42", (40, 42, False)),
        ("next", (1, 1, True)),
        ("+2", (2, 2, True)),
        ("+2-4", (2, 4, True)),
    ],
)
def test_steps_are_numbers_ranges_or_counted_from_the_running_one(text: str, expected: tuple[int, int, bool]) -> None:
    assert parse_steps(text) == expected


@pytest.mark.parametrize("text", ["", "0", "-1", "42-40", "4:2", "40-42:2", "all", "nxet", "+0", "1e3", "٣"])
def test_other_steps_are_refused(text: str) -> None:
    with pytest.raises(UserError, match=r"^STEPS: .*; give "):
        parse_steps(text)


def test_ranks_are_numbers_ranges_strides_or_all() -> None:
    ranges = parse_ranges([3, "8-10", "16-31:8", "all"], "ranks")
    assert [rank for rank in range(40) if any(rank in part for part in ranges[:3])] == [3, 8, 9, 10, 16, 24]
    assert 10**6 in ranges[3]
    assert Selection(1, 1, ranges[:3]).count(20) == 5


def test_the_phases_are_those_that_a_step_measures() -> None:
    folder = Path(trainer.__file__).parent
    text = "".join(file.read_text(encoding="utf-8") for file in folder.glob("*.py"))
    assert set(re.findall(r'with clock\("(\w+)"\)', text)) == set(PHASES)


def test_a_request_counts_from_the_step_in_which_it_is_read(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    run.profiles.mkdir()
    assert read_request(run) is None
    write_request(run, new_request(Selection(2, 3), relative=True))
    request = read_request(run)
    assert request is not None
    assert request.at(10) == Selection(12, 13)
    run.profile_request.write_text('{"id": "x", "first"')
    assert read_request(run) is None
