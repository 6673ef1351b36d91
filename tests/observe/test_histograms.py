"""A step's values are binned whole, within bounds of time and size."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rlhpc.core.files import LineFile
from rlhpc.core.histograms import Histogram, read_histograms
from rlhpc.observe.metrics import BINS, HistogramWriter, binned


def found(*parts: list[float]) -> Histogram:
    histogram = binned([np.array(part) for part in parts])
    assert histogram is not None
    return histogram


def test_every_value_is_in_its_bin() -> None:
    values = [0.0, 0.5, 0.5, 3.0, 30.0]
    histogram = found(values[:2], [], values[2:])
    assert (histogram.low, histogram.high, histogram.values, sum(histogram.counts)) == (0.0, 30.0, 5, 5)
    assert [histogram.counts[place] for place in (0, 3, 29)] == [3, 1, 1]


@pytest.mark.parametrize("value", [0.0, 1.0, -3e7, 1e200])
def test_equal_values_are_in_one_bin_around_them(value: float) -> None:
    histogram = found([value, value])
    assert histogram.low < value < histogram.high
    assert sorted(histogram.counts)[-1] == 2


def test_only_finite_values_are_binned() -> None:
    histogram = found([1.0, np.nan, np.inf, -np.inf, 2.0, 1e305])
    assert (histogram.low, histogram.high, sum(histogram.counts), histogram.values) == (1.0, 2.0, 2, 6)
    assert binned([np.array([np.nan])]) is binned([]) is None


def test_of_very_many_values_every_nth_is_binned() -> None:
    """As of the parts joined end to end: a short part is neither always nor never there."""
    histogram = binned([np.arange(7.0)] * 50_000)
    assert histogram is not None
    assert (histogram.values, sum(histogram.counts)) == (350_000, 87_500), "every fourth"
    assert [count for count in histogram.counts if count] == [12_500] * 7


def test_lines_are_spread_over_the_run(tmp_path: Path) -> None:
    writer = HistogramWriter(LineFile(tmp_path / "h"), total_steps=10, most=4)
    for step in range(1, 11):
        if writer.is_due(step):
            writer.write(step, {"reward": binned([np.array([1.0, step])]), "advantage": None})
    steps = read_histograms(tmp_path / "h")
    assert [step.step for step in steps] == [1, 4, 7, 10]
    assert [list(step.histograms) for step in steps] == [["reward"]] * 4
    assert not HistogramWriter(LineFile(tmp_path / "h"), 10, 0).is_due(1)


def test_a_line_is_short(tmp_path: Path) -> None:
    """1,000 lines of a large step are less than 2 MB."""
    normal = np.random.default_rng(0).normal(size=200_000).astype(np.float32)
    four = {name: binned([normal]) for name in ("response/length", "reward", "advantage", "logprob_diff")}
    HistogramWriter(LineFile(tmp_path / "h"), 10, 10).write(1, four)
    assert (tmp_path / "h").stat().st_size < 2000
    assert BINS == 30
