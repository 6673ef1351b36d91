"""The page in a real headless Chromium: its figures, what a user does with it, and hostile texts."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from rlhpc.core.folder import RunFolder
from rlhpc.observe.page.document import SCRIPTS, write_page
from tests.observe.page.conftest import Opened
from tests.observe.page.made_runs import LARGE, Size, make_run, separate_config

pytestmark = pytest.mark.heavy
Open = Callable[[Path], Opened]
MOST_BYTES = 2_000_000

HOSTILE = (
    "<script>window.hacked = 1</script>",
    "</script><script>window.hacked = 2</script>",
    '"><img src=x onerror="window.hacked = 3">',
    "<svg/onload=window.hacked=4>",
    "<!--<script>window.hacked = 5",
    "]]><iframe src=javascript:window.hacked=6></iframe>",
    "javascript:window.hacked=7",
    "'+(window.hacked=8)+'",
    "${window.hacked=9} `window.hacked=9`",
    "</title></style><base href=https://example.com/><link rel=stylesheet href=//example.com/x.css>",
    "\u2028window.hacked=11\u2029\N{GRINNING FACE} \u202e<b>right to left</b>",
    "__proto__",
)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[RunFolder]]:
    """The page of two runs, and the runs."""
    base = tmp_path_factory.mktemp("small")
    runs = [make_run(base / name, Size(steps=30, samples=100, rare_last=True)) for name in ("alpha", "beta")]
    write_page(runs, base / "page.html")
    return base / "page.html", runs


def test_a_large_page_is_small_and_drawn_without_a_request(tmp_path: Path, open_page: Open) -> None:
    """10,000 steps, 45 metrics, 64 ranks, 3 runs, 1,500 samples. `make bench` measures its time."""
    runs = [make_run(tmp_path / name, LARGE) for name in ("a", "b", "c")]
    file = tmp_path / "page.html"
    write_page(runs, file)
    print(f"{file.stat().st_size:,} bytes")
    assert file.stat().st_size < MOST_BYTES
    page = open_page(file)
    print(f"drawn in {page.drawn_ms:.0f} ms")
    assert (page.requests, page.problems) == ([file.as_uri()], [])
    assert page.tab.locator("figure.chart").count() == 45
    assert 6 <= page.visible("figure.chart canvas") < 45, "charts are made when they are seen"
    page.tab.locator("#timeline").scroll_into_view_if_needed()
    page.tab.wait_for_selector("#timeline td")
    assert "64 ranks" in page.text("#timeline output")
    page.tab.locator("#samples").scroll_into_view_if_needed()
    page.tab.wait_for_selector(".sample")
    assert page.text("#found") == "1500 of 1500"
    assert page.problems == []


def test_hostile_texts_stay_text(tmp_path: Path, open_page: Open) -> None:
    runs = [_hostile_run(tmp_path, number, text) for number, text in enumerate(HOSTILE)]
    write_page(runs, tmp_path / "page.html")
    page = open_page(tmp_path / "page.html")
    page.tab.evaluate("page.showAll()")
    page.tab.wait_for_selector(".sample")
    for _ in range(3):
        more = page.tab.locator("#samples button")
        if more.is_visible():
            more.click()
    page.tab.select_option("#settings-which", "all")
    shown = page.tab.evaluate("document.body.innerText + document.querySelector('main').textContent")
    for text in HOSTILE:
        assert shown.count(text) >= 8, f"{text!r} is shown {shown.count(text)} times"
    assert page.tab.evaluate("[window.hacked, ({}).polluted]") == [None, None]
    assert page.tab.locator("img, svg, iframe, base, link").count() == 0
    assert page.tab.locator("script").count() == len(SCRIPTS) + 2
    links = page.tab.evaluate("[...document.links].map(a => [a.getAttribute('href'), a.href])")
    assert len(links) > 50
    assert all(href.startswith(("./", "#")) and whole.startswith("file:") for href, whole in links)
    assert (page.requests, page.problems) == ([(tmp_path / "page.html").as_uri()], [])


def _hostile_run(base: Path, number: int, text: str) -> RunFolder:
    """A run with the text wherever a user, a model or a library may put one."""
    folder = base / f"{number} {text}".replace("/", "-")
    run = make_run(
        folder,
        Size(steps=4, metrics=3, samples=1, timeline=1),
        config={"name": text, "model": {"path": text}, text: text},
    )
    verdict = run.attempt(1).verdict
    found = json.loads(verdict.read_text())
    verdict.write_text(json.dumps({**found, "message": text, "node": text}))
    with open(run.metrics, "a") as metrics:
        metrics.write(json.dumps({"phase": "rl", "step": 5, "time": 1.76e9 + 50, text: 1.0}) + "\n")
        metrics.write(json.dumps({"phase": text, "step": 1, "time": 1.76e9 + 60, "loss": 1.0}) + "\n")
    sample = {
        "step": 1,
        "set": text,
        "source": text,
        "prompt": text,
        "response": text * 40,
        "expected": [text, "\ud83d \x00"],
        "reward": 1.0,
    }
    run.samples.write_text(json.dumps(sample) + "\n")
    timeline = {"phase": "rl", "step": 5, "time": 1.76e9, "spans": [[[text, 0.0, 1.0, 0.5]]]}
    run.timeline.write_text(json.dumps(timeline) + "\n")
    for file in (run.alerts, run.notes):
        file.write_text(
            json.dumps({"time": 1.76e9 + 20, "phase": "rl", "step": 2, "message": text, "text": text}) + "\n"
        )
    return run


def test_curves_show_the_runs_numbers_at_the_cursor(small: tuple[Path, list[RunFolder]], open_page: Open) -> None:
    file, runs = small
    page = open_page(file)
    over = page.tab.locator('[data-metric="reward/mean"] .u-over')
    box = over.bounding_box()
    page.tab.mouse.move(box["x"] + box["width"] * (20 - 1) / (30 - 1), box["y"] + 60)
    legend = page.tab.locator('[data-metric="reward/mean"] .u-legend .u-value')
    expected = [json.loads(run.metrics.read_text().splitlines()[19])["reward/mean"] for run in runs]
    assert [float(text) for text in legend.all_text_contents()[:3]] == pytest.approx([20, *expected], rel=1e-4)


def test_smoothing_axes_filters_and_runs_follow_the_keys(small: tuple[Path, list[RunFolder]], open_page: Open) -> None:
    page = open_page(small[0])
    keys = page.tab.keyboard
    data = "Array.from(page.curves.charts[0].plot.data[{}]).filter(v => v != null)"
    raw = page.tab.evaluate(data.format(1))
    assert page.tab.evaluate(data.format(3)) == []
    for _ in range(5):
        keys.press("s")
    assert page.text("#curves output") == "0.5"
    smooth = page.tab.evaluate(data.format(3))
    average, weight, expected = 0.0, 0.0, []
    for value in raw:
        average, weight = 0.5 * average + 0.5 * value, 0.5 * weight + 0.5
        expected.append(average / weight)
    assert smooth == pytest.approx(expected, rel=1e-5)
    keys.press("h")
    places = page.tab.evaluate(data.format(0))
    assert (places[0], places[-1]) == pytest.approx((0.0, 290 / 3600), rel=1e-4)
    keys.press("/")
    keys.type("reward mean")
    assert page.visible("figure.chart") == 1
    keys.press("Escape")
    keys.press("2")
    assert page.tab.evaluate("page.curves.charts[0].plot.series.map(s => s.show)") == [True, True, False, True, False]
    keys.press("?")
    assert page.visible("#help") == 1
    assert page.problems == []


def test_odd_numbers_are_drawn(tmp_path: Path, open_page: Open) -> None:
    """Smoothing makes 1.0000000000000002 of ones."""
    columns = {
        "one": [1.0] * 9,
        "large": [3e38, -3e38, 1.0],
        "small": [1e-40, 2e-40],
        "single": [0.5],
        "none": [math.nan],
    }
    run = make_run(tmp_path / "run", Size(steps=0, samples=0, timeline=0))
    for step in range(9):
        values = {name: column[step] for name, column in columns.items() if step < len(column)}
        with open(run.metrics, "a") as file:
            file.write(json.dumps({"phase": "rl", "step": step, "time": 1.76e9, **values}) + "\n")
    write_page([run], tmp_path / "page.html")
    page = open_page(tmp_path / "page.html")
    for key in "sh":
        page.tab.keyboard.press(key)
        page.tab.wait_for_timeout(100)
        assert page.visible("figure.chart .u-over") == len(columns)
        assert page.problems == []
    assert page.text('[data-metric="none"] h4') == "none 1 not finite"


def test_a_zoom_is_one_of_all_curves_until_a_double_click(small: tuple[Path, list[RunFolder]], open_page: Open) -> None:
    page = open_page(small[0])
    page.tab.evaluate("page.showAll(); scrollTo(0, 0)")
    over = page.tab.locator("figure.chart .u-over").first
    box = over.bounding_box()
    page.tab.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 50)
    page.tab.mouse.down()
    page.tab.mouse.move(box["x"] + box["width"] * 0.75, box["y"] + 50, steps=4)
    page.tab.mouse.up()
    ranges = "page.curves.charts.filter(c => c.plot).map(c => [c.plot.scales.x.min, c.plot.scales.x.max])"
    zoomed = page.tab.evaluate(ranges)
    assert len(zoomed) == 12
    assert all(found == pytest.approx([15.5, 22.75], abs=0.3) for found in zoomed)
    selected = "[...document.querySelectorAll('.u-select')].filter(e => e.offsetWidth).length"
    assert page.tab.evaluate(selected) == 0
    over.dblclick(position={"x": 30, "y": 30})
    assert sorted(page.tab.evaluate(ranges)) == [*([[1, 30]] * 11), [5, 30]]


def test_marks_are_on_the_curves_and_can_be_hidden(small: tuple[Path, list[RunFolder]], open_page: Open) -> None:
    page = open_page(small[0])
    over = page.tab.locator('[data-metric="reward/mean"] .u-over')
    box = over.bounding_box()

    def tip() -> str:
        page.tab.mouse.move(box["x"] + 3, box["y"] + 60)
        page.tab.mouse.move(box["x"] + box["width"] * (14 - 1) / (30 - 1), box["y"] + 60)
        return page.text('[data-metric="reward/mean"] .tip') if page.visible(".tip") else ""

    assert "alpha: attempt 1: bad node, rank 1 on node0: the GPU has fallen off the bus; requeue" in tip()
    page.tab.get_by_role("checkbox", name="requeue").uncheck()
    assert tip() == ""
    assert "bad node" not in page.text("#events table")
    assert (
        page.tab.locator("#events a", has_text="log of rank 0").first.get_attribute("href").endswith("rank-00000.log")
    )


def test_roles_of_ranks_are_shown(tmp_path: Path, open_page: Open) -> None:
    size = Size(ranks=8)
    write_page([make_run(tmp_path / "run", size, config=separate_config("run", size))], tmp_path / "page.html")
    page = open_page(tmp_path / "page.html")
    page.tab.evaluate("page.showAll()")
    roles = [f"{rank}trainer" for rank in range(4)] + [f"{rank}engine" for rank in range(4, 8)]
    assert page.tab.locator(".placement td").all_text_contents() == roles
    assert page.tab.locator(".placement td").nth(6).get_attribute("title") == "engine, engine 1"
    page.tab.select_option("#placement-axis", label="engine (2)")
    cells = ["0", "1", "2", "3", "4engine 0", "5engine 0", "6engine 1", "7engine 1"]
    assert page.tab.locator(".placement td").all_text_contents() == cells
    assert page.problems == []


def test_timeline_placement_samples_and_settings_answer(small: tuple[Path, list[RunFolder]], open_page: Open) -> None:
    page = open_page(small[0])
    page.tab.evaluate("page.showAll()")
    assert page.text("#timeline output").startswith("rl step 30,")
    page.tab.keyboard.press("[")
    assert page.text("#timeline output").startswith("rl step 29,")
    page.tab.locator("#timeline-bars").scroll_into_view_if_needed()
    bars = page.tab.locator("#timeline-bars").bounding_box()
    page.tab.mouse.move(bars["x"] + 80, bars["y"] + 8)
    assert re.match(r"rank 0: weight_sync, [\d.]+ s, of which [\d.]+ s waiting", page.text("#timeline .readout"))
    assert page.tab.locator(".placement td").all_text_contents() == ["0tp 0", "1tp 1", "2tp 0", "3tp 1"]
    page.tab.fill("#search", "question 42:")
    page.tab.wait_for_selector("#found:text-is('2 of 200')")
    assert page.visible(".sample") == 2
    page.tab.select_option("#settings-which", "runs")
    assert page.tab.locator(".settings tbody tr").all_text_contents() == ["namerequiredalphabeta"]
    assert page.problems == []


def test_printing_shows_all_charts_and_no_controls(small: tuple[Path, list[RunFolder]], open_page: Open) -> None:
    page = open_page(small[0])
    before = page.visible("figure.chart canvas")
    page.tab.emulate_media(media="print")
    page.tab.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert before < page.visible("figure.chart canvas") == 12
    assert page.visible("nav, .controls") == 0
