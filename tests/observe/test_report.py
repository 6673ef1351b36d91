"""The table at the end of an evaluation."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhpc.core.folder import RunFolder
from rlhpc.observe.report import write_evaluation


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / "run").create()


def cells(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]


def test_an_evaluation_has_a_column_for_all_and_for_each_group(folder: RunFolder):
    groups = {"": 0.5, "by_set/easy/": 1.0, "by_source/b/c/": 0.0}
    metrics = {f"{group}reward_mean": value for group, value in groups.items()}
    write_evaluation(folder, {**metrics, "pass@1": 0.25, "response_length": 20_000.4})
    text = folder.report_text.read_text()
    assert ["metric", "all", "easy", "b/c"] in cells(text)
    assert ["reward_mean", "0.5", "1", "0"] in cells(text)
    assert ["pass@1", "0.25", "", ""] in cells(text)
    assert ["response_length", "20,000", "", ""] in cells(text)
    assert text.splitlines()[-1] == f"Samples: {folder.samples}"
