"""The report at the end of a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlhpc.api import RunState
from rlhpc.core.folder import RunFolder
from rlhpc.observe.metrics import MetricsWriter
from rlhpc.observe.report import write_evaluation, write_report


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "run")
    folder.create()
    return folder


def write_run(folder: RunFolder) -> None:
    writer = MetricsWriter(folder, RunState())
    for step in range(1, 31):
        writer.write("sft", step, 30, {"loss": 2.0 / step, "grad_norm": 0.5})
    writer.write("rl", 0, 40, {"validation/reward_mean": 0.25})
    for step in range(1, 41):
        accuracy = {"validation/reward_mean": 0.25 + step / 60} if step % 10 == 0 else {}
        cost = {"cost/gpu_hours": step / 10, "cost/idle_gpu_hours": step / 40, "cost/tokens": step * 1000.0}
        writer.write("rl", step, 40, {"reward/mean": step / 50, "loss": 0.5, "grad_norm": 0.125, **cost, **accuracy})
    with open(folder.samples, "w") as file:
        for step, response in ((0, "75"), (40, "[bold]85")):
            sample = {"step": step, "prompt": "47+38=", "response": response, "expected": 85, "reward": 1.0}
            file.write(json.dumps(sample) + "\n")


def cells(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]


def test_text_has_final_metrics_validations_and_the_last_samples(folder: RunFolder):
    write_run(folder)
    write_report(folder)
    text = folder.report_text.read_text()
    assert "sft step 30/30" in text
    assert "rl step 40/40" in text
    lines = cells(text)
    assert ["grad_norm", "0.5", "0.125"] in lines
    assert ["validation/reward_mean", "", "0.9167"] in lines
    assert ["0", "0.25", ""] in lines
    assert ["20", "0.5833", "0.4"] in lines
    assert ["4", "25.0%", "40,000", "10,000"] in lines
    assert ["47+38=", "[bold]85", "85", "1"] in lines
    assert "75" not in [cell for line in lines for cell in line]


def test_plot_is_a_picture_of_readable_size(folder: RunFolder):
    from matplotlib.image import imread

    write_run(folder)
    write_report(folder)
    height, width, _ = imread(folder.report / "reward.png").shape
    assert width >= 1000
    assert height >= 500


def test_each_phase_has_a_plot_of_its_own_steps(folder: RunFolder, monkeypatch: pytest.MonkeyPatch):
    """The reward's plot shows RL alone, from the validation before its first step on."""
    from matplotlib.figure import Figure

    figures: dict[str, Figure] = {}
    monkeypatch.setattr(Figure, "savefig", lambda figure, path: figures.update({path.name: figure}))
    write_run(folder)
    write_report(folder)
    assert set(figures) == {"reward.png", "sft_loss.png"}
    reward, validation = (line for axes in figures["reward.png"].axes for line in axes.lines)
    assert list(reward.get_xdata()) == list(range(1, 41))
    assert reward.get_ydata()[-1] == 0.8
    assert list(validation.get_xdata()) == [0, 10, 20, 30, 40]
    (loss,) = (line for axes in figures["sft_loss.png"].axes for line in axes.lines)
    assert list(loss.get_xdata()) == list(range(1, 31))
    assert loss.get_ydata()[0] == 2.0
    assert [axes.get_ylim()[0] for figure in figures.values() for axes in figure.axes] == [0, 0]


def test_a_run_of_the_warm_up_alone_has_a_report(folder: RunFolder):
    writer = MetricsWriter(folder, RunState())
    writer.write("sft", 1, 1, {"loss": 2.0})
    write_report(folder)
    text = folder.report_text.read_text()
    assert "sft step 1/1" in text
    assert "Validation" not in text
    assert [file.name for file in folder.report.glob("*.png")] == ["sft_loss.png"]


def test_a_run_without_a_step_has_a_report(folder: RunFolder):
    write_report(folder)
    assert folder.report_text.is_file()


def test_long_texts_are_shortened_in_the_middle(folder: RunFolder):
    sample = {"step": 0, "prompt": "p", "response": "a" * 500 + "end", "expected": "e", "reward": 0.0}
    folder.samples.write_text(json.dumps(sample) + "\n")
    write_report(folder)
    text = folder.report_text.read_text()
    assert "…" in text
    assert "end" in text
    assert text.count("a") < 450


def test_large_numbers_and_long_paths_are_whole(tmp_path: Path):
    folder = RunFolder(tmp_path / ("run" * 50))
    folder.create()
    writer = MetricsWriter(folder, RunState())
    writer.write("rl", 1, 1, {"reward/mean": -20_000.4, "loss": -0.0000123})
    write_report(folder)
    text = folder.report_text.read_text()
    assert ["reward/mean", "-20,000"] in cells(text)
    assert ["loss", "-1.23e-05"] in cells(text)
    assert f"Plots: {folder.report}" in text.splitlines()


def test_odd_records_leave_a_report(folder: RunFolder):
    """None, NaN, infinity, text and lists where numbers are expected, and lines that are no steps."""
    odd = [None, float("nan"), float("inf"), float("-inf"), 10**400, "[/]", [1], {}]
    with open(folder.metrics, "w") as file:
        for step, value in enumerate(odd):
            record = {"phase": "rl", "step": step, "reward/mean": value, "validation/reward_mean": value, "loss": value}
            file.write(json.dumps(record) + "\n" + json.dumps({**record, "phase": "sft"}) + "\n")
        file.write('{"phase": null, "step": 1}\n{"phase": "rl"}\n[1]\n{"phase": "rl", "step": 9, "loss"\n')
        file.write(json.dumps({"phase": "rl", "step": 9, "reward/mean": 0.25, "total_steps": 9}) + "\n")
    folder.samples.write_text('{"step": 1}\n{"step": null}\n{"step": 1, "prompt": 7, "reward": "[/]"}\n')
    write_report(folder)
    lines = cells(folder.report_text.read_text())
    assert ["reward/mean", "{}", "0.25"] in lines
    assert ["7", "", "", "[/]"] in lines
    assert (folder.report / "reward.png").is_file()


def test_an_evaluation_has_a_column_for_all_and_for_each_group(folder: RunFolder):
    groups = {"": 0.5, "by_set/easy/": 1.0, "by_source/b/c/": 0.0}
    metrics = {f"{group}reward_mean": value for group, value in groups.items()}
    write_evaluation(folder, {**metrics, "pass@1": 0.25})
    text = folder.report_text.read_text()
    assert ["metric", "all", "easy", "b/c"] in cells(text)
    assert ["reward_mean", "0.5", "1", "0"] in cells(text)
    assert ["pass@1", "0.25", "", ""] in cells(text)
    assert text.splitlines()[-1] == f"Samples: {folder.samples}"
