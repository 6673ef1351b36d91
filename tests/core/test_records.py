"""Lines of JSON as readers take them: what is no record is left out."""

from __future__ import annotations

import math

import pytest

from rlhpc.core.records import is_step, number, parse_records


def test_only_whole_objects_are_records() -> None:
    torn = b'{"a": 1}\n{"b": \n\xff\n\x00\x00\n[1]\n3\n\n{"c": "\xe2\x80\xa8"}\r\n{"d": 4}'
    assert parse_records(torn) == [{"a": 1}, {"c": "\u2028"}]
    assert parse_records(b"") == parse_records(b"no line") == []


@pytest.mark.parametrize(
    ("value", "expected"),
    [(3, 3.0), (0.5, 0.5), (10**400, math.inf), (-(10**400), -math.inf), (True, None), ("3", None), (None, None)],
)
def test_a_number_is_a_float_or_nothing(value: object, expected: float | None) -> None:
    assert number(value) == expected


def test_a_step_names_its_phase_and_number() -> None:
    assert is_step({"phase": "rl", "step": 0})
    assert not any(is_step({"phase": "rl", "step": value}) for value in (None, True, 1.0, "1"))
    assert not is_step({"step": 1})
