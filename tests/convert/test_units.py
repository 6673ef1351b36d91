"""Sizes and times in words: never with an exponent."""

from __future__ import annotations

import pytest

from rlhpc.convert.progress import size_text, time_text


@pytest.mark.parametrize(
    ("count", "text"), [(12, "12 B"), (999.96e6, "1000 MB"), (1.342e12, "1.342 TB"), (12_345e12, "12,345 TB")]
)
def test_sizes_have_no_exponent(count: float, text: str) -> None:
    assert size_text(count) == text


@pytest.mark.parametrize(("seconds", "text"), [(0.1, "1 s"), (95, "95 s"), (150, "2 min"), (9000, "2.5 h")])
def test_times_left_are_short(seconds: float, text: str) -> None:
    assert time_text(seconds) == text
