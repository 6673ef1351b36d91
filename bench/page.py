"""Page of runs: its size, the time to write it and to draw it in headless Chromium; the page at the end of a short run.

10,000 steps, 45 metrics, 64 ranks, 3 runs, 1,500 samples; limits: 2 MB and 1.5 s, and 50 ms of CPU time at the end of a
short run.
"""

from __future__ import annotations

import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

from rlhpc.observe.page.document import write_own_page, write_page
from tests.observe.page.made_runs import LARGE, Size, make_run

ROUNDS = 7
PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        file = Path(name) / "page.html"
        runs = [make_run(Path(name) / run, LARGE) for run in ("a", "b", "c")]
        wall, cpu = time.perf_counter(), time.process_time()
        write_page(runs, file)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        print(f"page of 3 runs of {LARGE.steps:,} steps; limits: 2 MB, 1.5 s")
        print(f"  size                    {file.stat().st_size / 1e6:7.2f} MB")
        print(f"  written in              {wall:7.2f} s, {cpu:.2f} s of CPU time")
        if PROGRAM is None:
            print("  not drawn: chromium is not installed (make chromium)", file=sys.stderr)
        else:
            print(f"  drawn in                {statistics.median(_drawn(file)) / 1e3:7.2f} s, median of {ROUNDS}")
        short = make_run(Path(name) / "short", Size(steps=10))
        seconds = []
        for _ in range(ROUNDS):
            cpu = time.process_time()
            write_own_page(short, training=False)
            seconds.append(time.process_time() - cpu)
        print("page at the end of a run of 10 steps; limit: 0.05 s of CPU time")
        print(f"  written in              {statistics.median(seconds):7.3f} s")


def _drawn(file: Path) -> list[float]:
    """Milliseconds from the navigation until the page is drawn, each in a new tab."""
    from playwright.sync_api import sync_playwright

    found = []
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=PROGRAM, args=["--no-sandbox"])
        for _ in range(ROUNDS):
            tab = browser.new_page(viewport={"width": 1400, "height": 900})
            tab.goto(file.as_uri())
            tab.wait_for_selector("html[data-drawn]", timeout=60_000)
            found.append(float(tab.evaluate("document.documentElement.dataset.drawn")))
            tab.close()
        browser.close()
    return found


if __name__ == "__main__":
    main()
