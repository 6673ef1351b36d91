"""The page, `rlhpc status` and the progress of one made run, compared with stored ones."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import os
import time
from pathlib import Path

import pytest

from rlhpc.core.records import read_records
from rlhpc.launch.runs.run_registry import RunEntry, read_run
from rlhpc.launch.runs.status import as_json, run_status
from rlhpc.launch.runs.status_view import details, overview, show
from rlhpc.observe.page.collect import page_data
from rlhpc.observe.progress import Display, progress_line
from tests.helpers.golden import check_text
from tests.observe.page.made_runs import BEGAN, Size, make_run


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunEntry:
    """A finished run of two attempts, in a time zone of its own."""
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    folder = make_run(tmp_path / "made", Size(steps=8, metrics=24, ranks=2, samples=2, histograms=2))
    os.utime(folder.checkpoints / "step-00000004", (BEGAN + 41, BEGAN + 41))
    return read_run(folder.path)


def test_the_page_has_the_same_texts_and_numbers(run: RunEntry, accept_golden: bool) -> None:
    texts, numbers = page_data([run.folder], run.folder.report)
    texts["written"], texts["numbers"] = 0, _digest(numbers.packed())
    found = json.dumps(texts, indent=1).replace(str(run.folder.path), "RUN")
    check_text("views/page.json", found + "\n", accept_golden)


def _digest(packed: str) -> str:
    return hashlib.sha256(gzip.decompress(base64.b64decode(packed))).hexdigest()


def test_status_has_the_same_words(run: RunEntry, accept_golden: bool, capsys: pytest.CaptureFixture[str]) -> None:
    status = run_status(run, None)
    show(overview([status]))
    show(details(status))
    found = capsys.readouterr().out + json.dumps(as_json(status), indent=1) + "\n"
    check_text("views/status.txt", found.replace(str(run.folder.path), "RUN"), accept_golden)


def test_progress_has_the_same_words(run: RunEntry, accept_golden: bool, capsys: pytest.CaptureFixture[str]) -> None:
    records = read_records(run.folder.metrics)
    lines = [progress_line(records[:count]) for count in range(1, len(records) + 1)]
    with Display(plain_seconds=0.0) as display:
        display.update([], "weight_sync")
        for record in records:
            display.update([record])
    check_text("views/progress.txt", "\n".join([*lines, capsys.readouterr().out]), accept_golden)
