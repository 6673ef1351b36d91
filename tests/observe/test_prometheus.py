"""The file for Prometheus is read back by its own parser: every number, with odd names too."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from rlhpc.config.observe import ObserveSection
from rlhpc.core.folder import RunFolder
from rlhpc.observe.prometheus import PrometheusFile, prometheus_path, prometheus_text

RECORD: dict[str, Any] = {
    "phase": "rl",
    "step": 12,
    "time": 1766000000.25,
    "reward/mean": 0.1 + 0.2,
    "validation/pass@1": 1e-300,
    "validation/my set é/reward_mean": -1,
    "grad_norm": math.nan,
    "loss": math.inf,
    "kl": -math.inf,
    "none": None,
    "text": "x",
    "bool": True,
}


def to(place: bool | Path) -> ObserveSection:
    return ObserveSection(prometheus=place)


def read(text: str) -> dict[str, tuple[float, dict[str, str]]]:
    """Value and labels of each gauge, the label ``metric`` in its name."""
    found = {}
    for family in text_string_to_metric_families(text):
        assert (family.type, bool(family.documentation)) == ("gauge", True)
        for sample in family.samples:
            assert sample.timestamp is None
            labels = dict(sample.labels)
            metric = labels.pop("metric", "")
            assert (sample.name, metric) not in found, "a series occurs once"
            found[sample.name + (f" of {metric}" if metric else "")] = (sample.value, labels)
    return found


def test_every_number_is_there_and_exact() -> None:
    found = read(prometheus_text("my-run", RECORD))
    assert {value[1]["run"] for value in found.values()} == {"my-run"}
    assert {value[1]["phase"] for value in found.values()} == {"rl"}
    values = {name.removeprefix("rlhpc_"): value for name, (value, _) in found.items()}
    assert math.isnan(values.pop("grad_norm"))
    assert values == {
        "step": 12,
        "time": 1766000000.25,
        "reward_mean": 0.1 + 0.2,
        "validation_pass_1": 1e-300,
        "validation_my_set___reward_mean": -1,
        "loss": math.inf,
        "kl": -math.inf,
    }


def test_metrics_that_share_a_gauge_are_told_apart() -> None:
    found = read(prometheus_text("r", {"reward/a-b": 1.0, "reward/a_b": 2.0, "reward_a/b": 3.0, "x": 4.0}))
    assert {name: value for name, (value, _) in found.items()} == {
        "rlhpc_reward_a_b of reward/a-b": 1.0,
        "rlhpc_reward_a_b of reward/a_b": 2.0,
        "rlhpc_reward_a_b of reward_a/b": 3.0,
        "rlhpc_x": 4.0,
    }


@pytest.mark.parametrize("name", ['a"b', "a\\b", "a\nb", "a\\nb", 'é"} 7\n# TYPE x counter', "{}", "a\ud800"])
def test_odd_names_stay_labels_and_help(name: str) -> None:
    found = read(prometheus_text(name, {name: 1.0, name + "/": 2.0, name + ".": 3.0}))
    shown = name.replace("\ud800", "\\ud800")
    assert {key.partition(" of ")[2]: value for key, (value, _) in found.items()} == {
        "": 1.0,
        shown + "/": 2.0,
        shown + ".": 3.0,
    }
    assert {labels["run"] for _, labels in found.values()} == {shown}


def test_the_file_has_the_newest_step_alone(tmp_path: Path) -> None:
    file = PrometheusFile(to(tmp_path / "of_node"), "r", RunFolder(tmp_path / "run"))
    (tmp_path / "of_node").mkdir()
    for step in (1, 2):
        file.write({"phase": "rl", "step": step, f"only_{step}": 1.0})
    (path,) = (tmp_path / "of_node").iterdir()
    assert path.name == "rlhpc-r.prom"
    assert set(read(path.read_text())) == {"rlhpc_step", "rlhpc_only_2"}


def test_the_setting_names_a_file_a_folder_or_the_run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = RunFolder(tmp_path / "run")
    settings: tuple[bool | Path, ...] = (False, True, Path("a/b.prom"), tmp_path)
    found = [prometheus_path(to(setting), "x", run) for setting in settings]
    assert found == [None, tmp_path / "run/metrics.prom", tmp_path / "a/b.prom", tmp_path / "rlhpc-x.prom"]


def test_a_folder_that_is_missing_is_reported_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = PrometheusFile(to(tmp_path / "none"), "r", RunFolder(tmp_path / "run"))
    file.write(RECORD)
    file.write(RECORD)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("rlhpc: warning: continuing without the Prometheus file, which failed: FileNotFoundError")
    assert not (tmp_path / "none").exists()
