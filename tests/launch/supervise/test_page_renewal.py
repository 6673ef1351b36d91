"""The page of a run is renewed while it is going and at the end of an attempt, and never delays or ends a run."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlhpc.core.folder import RunFolder
from rlhpc.launch.supervise import side_processes
from rlhpc.launch.supervise.side_processes import PageRenewal
from tests.helpers.waiting import until


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / "run").create()


@pytest.fixture(autouse=True)
def always_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_processes, "LOOK_SECONDS", 0.0)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Commands of the processes that were started, each replaced by one that sleeps."""
    commands: list[list[str]] = []
    popen = subprocess.Popen

    def start(command: list[str], **options: object) -> subprocess.Popen[bytes]:
        commands.append(command)
        return popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"], **options)

    monkeypatch.setattr(subprocess, "Popen", start)
    return commands


def reach(run: RunFolder, step: int, phase: str = "rl") -> None:
    with open(run.metrics, "a") as file:
        file.write(json.dumps({"phase": phase, "step": step, "time": time.time(), "loss": 0.5}) + "\n")


@pytest.mark.heavy
def test_a_process_renews_the_page_of_a_running_run(run: RunFolder) -> None:
    pages = PageRenewal(run, every=10)
    reach(run, 10)
    pages.poll()
    until(run.page.is_file, "the page is there", 60)
    assert run.page.stat().st_size > 50_000


def test_a_renewal_begins_at_each_multiple_and_never_beside_another(run: RunFolder, started: list[list[str]]) -> None:
    pages, counts = PageRenewal(run, every=10), []
    for step in (1, 9, 10, 11, 19, 20, 30):
        reach(run, step)
        pages.poll()
        counts.append(len(started))
    assert counts == [0, 0, 1, 1, 1, 1, 1]
    assert started[0][1:] == ["-m", "rlhpc.observe.page", str(run.path)]
    pages._stop_child()
    reach(run, 31)
    pages.poll()
    assert len(started) == 2
    pages._stop_child()


def test_the_step_at_the_start_begins_no_renewal(run: RunFolder, started: list[list[str]]) -> None:
    reach(run, 25)
    pages = PageRenewal(run, every=10)
    reach(run, 26)
    pages.poll()
    assert started == []


def test_a_short_attempt_has_its_page_without_another_process(run: RunFolder, started: list[list[str]]) -> None:
    reach(run, 3)
    PageRenewal(run, every=50).end()
    assert run.page.is_file()
    assert started == []


def test_an_attempt_that_never_took_a_step_has_a_page(run: RunFolder) -> None:
    PageRenewal(run, every=50).end()
    assert run.page.is_file()


def test_a_page_that_takes_long_delays_nothing(run: RunFolder, started: list[list[str]]) -> None:
    reach(run, 100)
    pages = PageRenewal(run, every=10)
    begun = time.monotonic()
    pages.end(0.0)
    pages.end(0.1)
    assert time.monotonic() - begun < 5
    assert len(started) == 2
    assert pages._child is not None
    pages._stop_child()


def test_a_page_that_cannot_be_written_is_reported_once(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    run.report.write_text("a file where the folder would be")
    pages = PageRenewal(run, every=50)
    for _ in range(2):
        reach(run, 1)
        pages.end()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("rlhpc: warning: continuing without the page of the run, which failed: FileExistsError")


@pytest.mark.heavy
def test_a_process_that_fails_is_reported_once(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    run.report.write_text("a file where the folder would be")
    pages = PageRenewal(run, every=1)
    for step in (1, 2):
        reach(run, step)
        pages.poll()
        assert pages._child is not None
        pages._child.wait(60)
        pages.poll()
    (line,) = capsys.readouterr().err.splitlines()
    assert "its process ended with 1; write it with: rlhpc report" in line
