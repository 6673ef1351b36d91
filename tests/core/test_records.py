"""Readers of JSON lines: cut and malformed lines, steps that come again, files that grow, are cut or replaced."""

from __future__ import annotations

import json
import math
import os
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from rlhpc.core.records import LineFollower, MetricsFile, is_step, newest_records, number, read_records


def step(phase: str, number: int, time: float = 1.0, **more: Any) -> dict[str, Any]:
    return {"phase": phase, "step": number, "time": time, **more}


def write(file: Path, *records: dict[str, Any], end: str = "") -> None:
    """Appends records, and the beginning of a line."""
    with open(file, "a") as out:
        out.write("".join(json.dumps(record) + "\n" for record in records) + end)


def replace(file: Path, *records: dict[str, Any]) -> None:
    """As a resumed run does, with the steps of its checkpoint and maybe further ones."""
    new = file.with_name("new")
    new.touch()
    write(new, *records)
    os.replace(new, file)


def seen(steps: list[dict[str, Any]]) -> list[tuple[str, int, float]]:
    return [(one["phase"], one["step"], one["time"]) for one in steps]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


@pytest.mark.parametrize(
    ("value", "expected"),
    [(3, 3.0), (0.5, 0.5), (10**400, math.inf), (-(10**400), -math.inf), (True, None), ("3", None), (None, None)],
)
def test_a_number_is_a_float_or_nothing(value: object, expected: float | None) -> None:
    assert number(value) == expected


def test_a_step_names_its_phase_and_number() -> None:
    assert is_step({"phase": "rl", "step": 0})
    assert not any(is_step({"phase": "rl", "step": value}) for value in (None, True, 1.0, "1", -1))
    assert not any(is_step({"phase": value, "step": 1}) for value in (None, "", "other", []))


ODD = b"\n".join(
    [
        b'{"phase": "rl", "st',
        b"\x00\x00\x00",
        b"\xff\xfe{",
        b"[1, 2]",
        b"null",
        b"",
        b"[" * 100_000,
        b'{"phase": "rl", "step": ' + b"9" * 5000 + b"}\n",
    ]
)


def test_only_whole_objects_are_records(file: Path) -> None:
    assert read_records(file) == []
    file.write_bytes(b"no line")
    assert read_records(file) == []
    file.write_bytes(b'{"a": 1}\n' + ODD + b'{"c": "\xe2\x80\xa8"}\r\n{"d": 4}')
    assert read_records(file) == LineFollower(file).read() == [{"a": 1}, {"c": "\u2028"}]


@pytest.mark.parametrize("block", [1, 7, 64, 1 << 16])
def test_lines_are_whole_wherever_blocks_end(file: Path, monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    monkeypatch.setattr("rlhpc.core.records._BLOCK", block)
    records = [{"n": n, "text": "é" * n} for n in range(12)]
    write(file, *records, end='{"n": 12')
    assert [*newest_records(file)] == records[::-1]
    assert read_records(file) == records


def test_the_end_of_a_large_file_takes_little_memory(file: Path) -> None:
    with open(file, "wb") as out:
        out.write(b'{"phase": "rl", "step": 1}\n')
        out.truncate(4 << 30)  # no line, and no space on the disk
    write(file, *(step("rl", n, text="x" * 10_000) for n in range(-1, 100)), end='{"phase": "rl", "st')
    tracemalloc.start()
    assert [one["step"] for one in MetricsFile(file).tail(3)] == [97, 98, 99]
    assert MetricsFile(file).last_step() == ("rl", 99)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_the_last_step_is_found_before_malformed_lines(file: Path) -> None:
    assert MetricsFile(file).last_step() is None
    write(file, step("rl", 7), end="x" * 300_000 + '\n{"step": 9}\n{"phase": "rl", "st')
    assert MetricsFile(file).last_step() == ("rl", 7)
    write(file, end='ep": 8}\n')
    assert MetricsFile(file).last_step() == ("rl", 8)


def test_a_step_that_comes_again_replaces_those_from_it_on(file: Path) -> None:
    """The newest of each phase; supervised steps are before those of RL."""
    write(file, step("sft", 1), step("sft", 2), step("rl", 0), step("rl", 1), step("rl", 2), step("rl", 3))
    write(file, step("rl", 2, 2.0), {"phase": "rl"})
    again = [("sft", 1, 1.0), ("sft", 2, 1.0), ("rl", 0, 1.0), ("rl", 1, 1.0), ("rl", 2, 2.0)]
    assert seen(MetricsFile(file).steps()) == again
    assert seen(MetricsFile(file).tail(2)) == again[-2:]
    write(file, step("sft", 2, 3.0))
    assert seen(MetricsFile(file).steps()) == [("sft", 1, 1.0), ("sft", 2, 3.0)]
    follower = MetricsFile(file).follow()
    steps, again_from = follower.read()
    assert (seen(steps), again_from) == ([("sft", 1, 1.0), ("sft", 2, 3.0)], None)


def test_a_follower_reads_each_line_when_it_is_whole(file: Path) -> None:
    follower = MetricsFile(file).follow()
    assert follower.read() == ([], None)
    write(file, step("rl", 1), step("rl", 2), end='{"phase": "rl", "st')
    assert follower.read() == ([step("rl", 1), step("rl", 2)], None)
    assert follower.read() == ([], None)
    write(file, end='ep": 3}\n')
    assert follower.read() == ([{"phase": "rl", "step": 3}], None)


@pytest.mark.parametrize("late", [0, 1, 2, 5])
def test_a_follower_says_where_a_resumed_run_s_steps_come_again(file: Path, late: int) -> None:
    """Step 3 is lost. ``late`` steps are in the new file by the next look: with 2 it is as long as the old one was, or
    longer, so that the old offset is in the middle of a line."""
    write(file, step("sft", 1), *(step("rl", n) for n in (1, 2, 3)))
    follower = MetricsFile(file).follow()
    assert follower.read()[1] is None
    again = [step("rl", n, 100.25 + n) for n in range(3, 3 + late)]
    replace(file, step("sft", 1), step("rl", 1), step("rl", 2), *again)
    assert follower.read() == (again, (1, 3) if late else None)
    write(file, *(step("rl", n, 200.0) for n in range(3 + late, 10)))
    assert follower.read() == ([step("rl", n, 200.0) for n in range(3 + late, 10)], None if late else (1, 3))


def test_a_follower_says_where_appended_steps_come_again(file: Path) -> None:
    write(file, *(step("rl", n) for n in (1, 2, 3)))
    follower = MetricsFile(file).follow()
    follower.read()
    write(file, step("rl", 4), step("rl", 3, 2.0), step("rl", 2, 3.0), step("rl", 3, 3.0))
    assert follower.read() == ([step("rl", 2, 3.0), step("rl", 3, 3.0)], (1, 2))


def test_a_follower_reads_a_file_that_was_cut_in_place(file: Path) -> None:
    write(file, step("rl", 1), step("rl", 2))
    follower = LineFollower(file)
    follower.read()
    os.truncate(file, 0)
    assert follower.read() == []
    write(file, step("rl", 1), step("rl", 2, 7.0))
    assert follower.read() == [step("rl", 2, 7.0)]


def test_a_follower_reads_only_new_lines_of_a_file_without_its_oldest_ones(file: Path) -> None:
    """As alerts.jsonl, which is written again without them."""
    write(file, *({"n": n} for n in range(5)))
    follower = LineFollower(file)
    follower.read()
    replace(file, *({"n": n} for n in range(3, 7)))
    assert follower.read() == [{"n": 5}, {"n": 6}]


def test_a_follower_waits_for_a_file_that_is_not_there(file: Path) -> None:
    write(file, {"n": 1})
    follower = LineFollower(file)
    follower.read()
    file.rename(file.with_name("away"))
    assert follower.read() == []
    file.with_name("away").rename(file)
    write(file, {"n": 2})
    assert follower.read() == [{"n": 2}]
