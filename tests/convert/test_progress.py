"""The progress line of a conversion."""

from __future__ import annotations

from rlhpc.convert.progress import ProgressLine


def test_a_line_that_cannot_be_printed_ends_nothing() -> None:
    with open("/dev/full", "w") as full:
        line = ProgressLine(full)
        line.note("pieces exist already")
        for done in (0, 1, 10):
            line.update(done, 10)
        line.end()
        assert line.summary()
