"""histograms.jsonl: what is written is read back, and what is malformed is left out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlhpc.core.histograms import (
    DIFF_BINS,
    Histogram,
    StepHistograms,
    diff_histogram,
    inner_diff_edges,
    interval,
    read_histograms,
)

WHOLE = {"low": 0, "high": 1.0, "counts": [1, 2], "values": 3}


def line(step: int, **histograms: object) -> bytes:
    return json.dumps({"phase": "rl", "step": step, "time": 2.0, "histograms": histograms}).encode() + b"\n"


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    reward, diff = Histogram(-1.0, 1.0, (3, 0, 5), 8), Histogram(-7.0, 1.0, (2, 1), 3, "log10")
    steps = [StepHistograms(step, 1.5, {"reward": reward, "logprob_diff": diff}) for step in (1, 4)]
    (tmp_path / "h").write_text("".join(json.dumps(step.to_json()) + "\n" for step in steps))
    assert read_histograms(tmp_path / "h") == steps
    assert read_histograms(tmp_path / "none") == []


def test_edges_are_in_the_unit_of_the_values() -> None:
    assert Histogram(0.0, 3.0, (1, 2, 3), 6).bins == ((0.0, 1.0, 1), (1.0, 2.0, 2), (2.0, 3.0, 3))
    assert Histogram(-2.0, 1.0, (1, 2, 3), 6, "log10").edges == pytest.approx((0.01, 0.1, 1.0, 10.0))


def read(folder: Path, data: bytes) -> list[StepHistograms]:
    (folder / "h").write_bytes(data)
    return read_histograms(folder / "h")


@pytest.mark.parametrize(
    "change",
    [
        {"low": 1},
        {"low": 2},
        {"low": float("nan")},
        {"high": float("inf")},
        {"high": None},
        {"counts": []},
        {"counts": [1.5]},
        {"counts": [True]},
        {"counts": [-1]},
        {"counts": [0] * 1001},
        {"counts": 3},
        {"values": None},
        {"scale": "cubic"},
        {"scale": []},
        {"scale": "log10", "high": 301},
    ],
)
def test_a_malformed_histogram_is_left_out(tmp_path: Path, change: dict[str, object]) -> None:
    (found,) = read(tmp_path, line(1, odd={**WHOLE, **change}, reward=WHOLE, text="x"))
    assert list(found.histograms) == ["reward"]


def test_malformed_lines_are_left_out(tmp_path: Path) -> None:
    odd = b'{"phase": "rl", "step": 1, "time": 1}\n{"step": 1, "time": 1, "histograms": {}}\n[1]\n{"phase": "rl", "st\n'
    assert [found.step for found in read(tmp_path, odd + line(2) + line(3)[:-1])] == [2]


@pytest.mark.parametrize(("total", "most", "lines"), [(3, 1000, 3), (1000, 1000, 1000), (10001, 1000, 910), (7, 1, 1)])
def test_a_run_writes_at_most_so_many_lines(total: int, most: int, lines: int) -> None:
    gap = interval(total, most)
    assert sum((step - 1) % gap == 0 for step in range(1, total + 1)) == lines <= most


def test_without_lines_there_is_no_interval() -> None:
    assert interval(10, 0) == 0


def test_counts_above_each_edge_become_bins() -> None:
    edges = inner_diff_edges()
    values = [0.0, 1e-9, 2e-7, 0.02, 0.5, 100.0]
    above = [float(sum(value > edge for value in values)) for edge in edges]
    found = diff_histogram(above, float(len(values)))
    assert found is not None
    assert (len(found.counts), sum(found.counts), found.values) == (DIFF_BINS, 6, 6)
    assert [count for low, high, count in found.bins if low <= 0.02 < high or low <= 0.5 < high] == [1, 1]
    assert (found.counts[0], found.counts[-1]) == (3, 1)
    assert diff_histogram([0.0] * len(edges), 0.0) is None
