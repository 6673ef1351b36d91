"""Numbers in tables."""

from __future__ import annotations

import pytest

from rlhpc.cli.output import seconds_text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 µs"),
        (4.2e-5, "42 µs"),
        (0.00099961, "1 ms"),
        (0.01234, "12.3 ms"),
        (0.9994, "999 ms"),
        (0.99961, "1 s"),
        (99.96, "100 s"),
        (12345.0, "12,345 s"),
    ],
)
def test_times_are_rounded_into_the_next_unit(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text
