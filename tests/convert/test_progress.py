"""The progress line of a conversion."""

from __future__ import annotations

import io
import time

import pytest

from rlhpc.convert.progress import ProgressLine


def test_a_line_that_cannot_be_printed_ends_nothing() -> None:
    with open("/dev/full", "w") as full:
        line = ProgressLine(full)
        line.note("files exist already")
        for done in (0, 1, 10):
            line.update(done, 10)
        line.end()
        assert line.summary()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_line_shows_rate_and_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    line = ProgressLine(out := Terminal())
    line.update(0, 4_000_000_000)
    for seconds, done in ((2, 1_000_000_000), (2.1, 1_100_000_000), (1000, 2_000_000_000), (2000, 4_000_000_000)):
        now[0] = 100 + seconds
        line.update(done, 4_000_000_000)
    assert out.getvalue().replace("\x1b[K", "").strip("\r").split("\r") == [
        " 25% | 1 GB of 4 GB | 500 MB/s | 6 s left",
        " 50% | 2 GB of 4 GB | 2 MB/s | 17 min left",
        "100% | 4 GB of 4 GB | 2 MB/s | finishing",
    ]
