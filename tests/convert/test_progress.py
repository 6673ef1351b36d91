"""The progress line of a conversion, and its time by part."""

from __future__ import annotations

import io
import time
from pathlib import Path

import pytest

from rlhpc.checkpoint.formats.arrays import timed, timed_seconds
from rlhpc.convert.execute import convert
from rlhpc.convert.progress import ProgressLine
from tests.convert.helpers import plan
from tests.helpers.tiny_models import make_model


def test_a_line_that_cannot_be_printed_ends_nothing() -> None:
    with open("/dev/full", "w") as full:
        line = ProgressLine(full)
        line.note("pieces exist already")
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


def test_seconds_are_counted_for_the_innermost_part(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    timed_seconds()
    with timed("write"):
        now[0] += 1
        for _ in range(2):
            with timed("read"):
                now[0] += 2
                with timed("cast"):
                    now[0] += 4
        now[0] += 8
    assert timed_seconds() == {"write": 9, "read": 4, "cast": 8}
    assert not timed_seconds()


def test_a_conversion_reports_its_time_by_part(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "llama")
    line = ProgressLine(io.StringIO())
    convert(plan(model, "megatron", dtype="bfloat16"), tmp_path / "there", workers=1, progress=line)
    assert set(line.parts) == {"read", "cast", "checksum", "write", "finish"}
    assert all(seconds > 0 for seconds in line.parts.values())
