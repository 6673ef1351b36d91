"""Histograms on the page: what is packed, without a browser; what Chromium draws."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from rlhpc.core.histograms import NAMES, read_histograms
from rlhpc.core.records import Record
from rlhpc.observe.page.document import write_page
from rlhpc.observe.page.numbers import Numbers, Place, pack_distributions, spread
from tests.observe.page.conftest import Opened
from tests.observe.page.made_runs import Size, make_run

Open = Callable[[Path], Opened]
# Two steps whose ranges differ; the second lacks rewards. Counts without two equal ones, but for 0.
STEPS: list[dict[str, Any]] = [
    {
        "response/length": {"low": 0.0, "high": 40.0, "counts": [8, 0, 4, 2], "values": 14},
        "reward": {"low": 0.0, "high": 1.0, "counts": [3, 0, 5], "values": 8},
        "logprob_diff": {"low": -4.0, "high": 0.0, "counts": [6, 9, 0, 1], "values": 16, "scale": "log10"},
    },
    {
        "response/length": {"low": 40.0, "high": 80.0, "counts": [1, 7], "values": 300},
        "logprob_diff": {"low": -4.0, "high": 0.0, "counts": [0, 2, 5, 3], "values": 10, "scale": "log10"},
    },
]


def record(step: int, histograms: dict[str, Any]) -> Record:
    return {"phase": "rl", "step": step, "time": 1.76e9, "histograms": histograms}


def written(path: Path, records: list[Record]) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in records))
    return path


def test_all_counts_are_packed_with_their_ranges_and_scale(tmp_path: Path) -> None:
    numbers = Numbers()
    file = written(tmp_path / "h", [record(3 + 4 * place, found) for place, found in enumerate(STEPS)])
    packed = pack_distributions(file, numbers, 200)
    assert packed is not None

    def at(place: Place) -> list[float]:
        return list(numbers.data[place[0] : sum(place)])

    assert at(packed["steps"]) == [3, 7]
    lengths, rewards, diffs = packed["histograms"]
    assert [(one["name"], one["log"]) for one in (lengths, rewards, diffs)] == [
        ("response/length", False),
        ("reward", False),
        ("logprob_diff", True),
    ]
    assert [at(rewards[key]) for key in ("lows", "highs", "values", "bins", "counts")] == [
        [0, 0],
        [1, 0],
        [8, 0],
        [3, 0],
        [3, 0, 5],
    ]
    assert (at(lengths["bins"]), at(lengths["counts"])) == ([4, 2], [8, 0, 4, 2, 1, 7])
    assert (at(lengths["lows"]), at(lengths["highs"]), at(lengths["values"])) == ([0, 40], [40, 80], [14, 300])
    assert (at(diffs["lows"]), at(diffs["counts"])) == ([-4, -4], [6, 9, 0, 1, 0, 2, 5, 3])


def test_steps_are_thinned_evenly_with_the_first_and_the_last() -> None:
    assert spread(range(5), 5) == [0, 1, 2, 3, 4]
    thinned = spread(range(1000), 200)
    assert (len(thinned), thinned[0], thinned[-1]) == (200, 0, 999)
    assert {later - earlier for earlier, later in pairwise(thinned)} == {5, 6}


def test_a_run_without_histograms_and_odd_ones_are_left_out(tmp_path: Path) -> None:
    wide = {"low": 0.0, "high": 1.0, "counts": [1] * 101, "values": 101}
    assert pack_distributions(tmp_path / "none", Numbers(), 200) is None
    assert pack_distributions(written(tmp_path / "own", [record(1, {"own": wide})]), Numbers(), 200) is None
    numbers = Numbers()
    linear = {**STEPS[0]["logprob_diff"], "scale": "linear"}
    odd = [record(1, {"reward": wide, "logprob_diff": linear}), record(2, STEPS[0])]
    packed = pack_distributions(written(tmp_path / "odd", odd), numbers, 200)
    assert packed is not None
    bins = {one["name"]: list(numbers.data[one["bins"][0] :][:2]) for one in packed["histograms"]}
    assert bins == {"response/length": [0, 4], "reward": [0, 3], "logprob_diff": [0, 4]}


@pytest.fixture(scope="module")
def written_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a run with STEPS and of one with many steps."""
    base = tmp_path_factory.mktemp("distributions")
    few, many = make_run(base / "few"), make_run(base / "many", Size(steps=30, samples=2, histograms=30))
    written(few.histograms, [record(3 + 4 * place, found) for place, found in enumerate(STEPS)])
    assert [len(step.histograms) for step in read_histograms(many.histograms)] == [len(NAMES)] * 30
    write_page([few, many], base / "page.html")
    return base / "page.html"


# Brightness of a heat map at the middle of each bin of each step, from 0 to 255, by the file's own ranges.
BRIGHTNESS = """([name, steps]) => {
  const canvas = document.querySelector(`[data-histogram="${name}"] canvas`);
  const low = Math.min(...steps.map(s => s.low)), high = Math.max(...steps.map(s => s.high));
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  return steps.map((step, column) => step.counts.map((_, bin) => {
    const value = step.low + (step.high - step.low) * (bin + 0.5) / step.counts.length;
    const x = canvas.width * (column + 0.5) / steps.length, y = canvas.height * (1 - (value - low) / (high - low));
    const [r, g, b] = data.subarray(4 * (Math.floor(y) * canvas.width + Math.floor(x)));
    return 0.3 * r + 0.59 * g + 0.11 * b;
  }));
}"""


@pytest.mark.heavy
def test_heat_maps_and_bars_show_the_counts(written_page: Path, open_page: Open) -> None:
    page = open_page(written_page)
    page.tab.evaluate("page.showAll()")
    for name in ("response/length", "logprob_diff"):
        drawn = page.tab.evaluate(BRIGHTNESS, [name, [step[name] for step in STEPS]])
        for step, brightness in zip(STEPS, drawn, strict=True):
            counts = step[name]["counts"]
            by_count = [brightness[place] for place in sorted(range(len(counts)), key=counts.__getitem__)]
            assert all(less - more > 8 for less, more in pairwise(by_count)), (name, by_count)
            assert [value > 254 for value in brightness] == [count == 0 for count in counts]

    def bars(name: str) -> list[float]:
        return page.tab.evaluate(
            "n => [...document.querySelectorAll(`[data-histogram='${n}'] .columns i`)].map(e => e.clientHeight)", name
        )

    def label(name: str) -> str:
        return page.text(f"[data-histogram='{name}'] small:nth-of-type(2)")

    assert bars("response/length") == pytest.approx([100 / 7, 100], abs=2)
    assert label("response/length") == "step 7: 40 (left) to 80 (right), 300 values"
    assert (bars("reward"), label("reward")) == ([], "step 7: no values")
    page.tab.keyboard.press("{")
    assert bars("logprob_diff") == pytest.approx([100 * count / 9 for count in (6, 9, 0, 1)], abs=2)
    assert label("logprob_diff") == "step 3: 1.000e-4 (left) to 1 (right), 16 values"
    rows = page.tab.locator("[data-histogram='logprob_diff'] tbody tr").all_text_contents()
    assert rows == ["below 0.0016", "0.001 to 0.019", "0.01 to 0.10", "above 0.11"]
    assert bars("reward") == pytest.approx([60, 0, 100], abs=2)
    assert page.problems == []


@pytest.mark.heavy
def test_steps_and_runs_are_chosen_by_keys_and_clicks_and_printed(written_page: Path, open_page: Open) -> None:
    page = open_page(written_page)
    page.tab.keyboard.press("{")  # before the section was seen
    assert "few, rl step 3:" in page.text("#distributions .readout")
    page.tab.focus("#distributions-step")
    page.tab.keyboard.press("ArrowRight")
    assert "few, rl step 7:" in page.text("#distributions .readout")
    page.tab.select_option("#distributions select", "1")
    assert page.tab.locator(".distribution h4").all_text_contents() == list(NAMES)
    canvas = page.tab.locator("[data-histogram='reward'] canvas")
    canvas.click(position={"x": canvas.bounding_box()["width"] * 11.5 / 30, "y": 50})
    assert "many, rl step 12:" in page.text("#distributions .readout")
    page.tab.emulate_media(media="print")
    page.tab.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.visible("#distributions canvas") == page.visible("#distributions .columns") == 4
    assert page.visible("#distributions .controls, #distributions details") == 0
    assert page.problems == []
