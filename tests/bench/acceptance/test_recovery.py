"""Figures of a resumed run, from fake records."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from bench.acceptance import runs
from bench.acceptance.results import Context, Figure, Skipped
from bench.acceptance.runs import difference, run_dense, run_experts
from rlhpc.config.schema import RunConfig

Records = list[dict[str, Any]]


def records(*losses: float) -> Records:
    """Records with different times in each list."""
    sft = [{"phase": "sft", "step": n, "loss": loss, "time": id(losses)} for n, loss in enumerate(losses, 1)]
    return [*sft, {"phase": "rl", "step": 1, "policy_loss": 0.5, "perf/step_seconds": id(losses)}]


SAME, OTHER = records(2.0, 1.0), records(2.0, 1.001)


def figures(
    monkeypatch: pytest.MonkeyPatch, folder: Path, part: Any, found: Mapping[str, Records]
) -> dict[str, Figure]:
    """Figures of a part whose runs, by name, have these records."""

    def run(config: RunConfig, **_: Any) -> Records:
        return found[config.name]

    monkeypatch.setattr(runs, "run", run)
    monkeypatch.setattr(runs, "run_and_kill", lambda config, after: None)
    monkeypatch.setattr(runs.arithmetic, "make", lambda folder: None)
    monkeypatch.setattr(runs, "write_model", lambda folder, name, **_: folder)
    reported: list[Figure | Skipped] = []
    part(Context(folder, "tiny", on_gpu=False, report=reported.append))
    return {result.name: result for result in reported if isinstance(result, Figure)}


def test_times_alone_may_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = figures(monkeypatch, tmp_path, run_dense, {"dense-straight": SAME, "dense-resumed": records(2.0, 1.0)})
    assert {name: (figure.value, figure.met) for name, figure in found.items()} == {"dense: bit-equal": (True, True)}


@pytest.mark.parametrize("again", [SAME, OTHER], ids=["fixed order", "no fixed order"])
def test_a_difference_is_distinguished_from_kernels_without_a_fixed_order(
    again: Records, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = {"dense-straight": SAME, "dense-resumed": OTHER, "dense-again": again}
    found = figures(monkeypatch, tmp_path, run_dense, lines)
    assert found["dense: bit-equal"].met is False
    assert found["dense: two runs without a kill are bit-equal"].value == (again is SAME)
    assert found["dense: maximum difference of a supervised loss"].value == pytest.approx(0.001)


@pytest.mark.parametrize(("loss", "met"), [(1.0, True), (1.005, True), (1.02, False)])
def test_experts_have_a_bound(loss: float, met: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = {"moe-straight": SAME, "moe-resumed": records(2.0, loss)}
    found = figures(monkeypatch, tmp_path, run_experts, lines)
    assert found["experts: maximum difference of a supervised loss"].met is met
    assert found["experts: bit-equal"].value is (loss == 1.0)
    assert found["experts: bit-equal"].goal is None


def test_missing_steps_are_no_small_difference() -> None:
    assert difference(SAME, SAME[1:]) == float("inf")


def test_a_run_that_fails_before_its_kill_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And no later run is killed instead."""
    config = runs.recovery_config(Context(tmp_path, "tiny", False, print), "dense", None)
    monkeypatch.setattr(runs, "run_here", lambda config: 1)
    monkeypatch.setattr(runs, "show_logs", lambda config: None)
    with pytest.raises(RuntimeError, match="exit code 1 before it was killed after 5 records"):
        runs.run_and_kill(config, after_records=5)
    assert "kill" not in {thread.name for thread in threading.enumerate()}
