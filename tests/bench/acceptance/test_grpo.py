"""GRPO steps vs. the plan, and a resumed run: sizes and figures, from fake records and peaks."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.acceptance import runs
from bench.acceptance.grpo import (
    LARGE,
    Case,
    Peaks,
    fitting_layers,
    memory_figures,
    peaks_file,
    run_config,
    step_figures,
    time_figures,
)
from bench.acceptance.results import Context, Figure, Skipped
from bench.acceptance.runs import difference, run_dense, run_experts
from bench.shapes import model_shape
from rlhpc.config.schema import RunConfig
from rlhpc.config.site import EfficiencySection
from rlhpc.core.files import write_json
from rlhpc.core.folder import RunFolder
from rlhpc.models import ModelShape
from rlhpc.plan.calibrate import phase_seconds
from rlhpc.plan.estimates.hardware import GPUS
from rlhpc.plan.estimates.memory import GIB, predict_memory
from rlhpc.plan.estimates.step_time import predict_step
from rlhpc.sharding.layout import ParallelLayout

H100, H200 = GPUS["h100"], GPUS["h200"]
ONE = ParallelLayout(1)


@pytest.fixture
def case(tmp_path: Path) -> Case:
    """1.5B, all layers, on a known GPU."""
    work = LARGE["1.5b"]
    config = run_config(tmp_path, work, on_gpu=True)
    config.folder.mkdir()
    return Case(config, model_shape(work.shape), H100, known=True)


def named(results: Sequence[Figure | Skipped]) -> dict[str, Figure]:
    return {result.name: result for result in results if isinstance(result, Figure)}


@pytest.mark.parametrize("gpu", [H100, H200], ids=lambda gpu: gpu.name)
def test_8b_gets_as_many_layers_as_fit(tmp_path: Path, gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda folder: type("Usage", (), {"free": 1 << 40}))
    work, limit = LARGE["8b"], 0.92 * gpu.memory_bytes
    config = run_config(tmp_path, work, on_gpu=True)
    layers = fitting_layers(tmp_path, work, gpu)
    assert layers is not None
    assert 4 <= layers < 32
    peaks = [predict_memory(config, model_shape("8b", n), ONE, gpu.memory_gib).peak for n in (layers, layers + 1)]
    assert peaks[0] <= limit < peaks[1]


def test_1_5b_fits_whole_into_80_gb(tmp_path: Path) -> None:
    assert fitting_layers(tmp_path, LARGE["1.5b"], H100) == 28


def test_a_model_is_cut_to_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda folder: type("Usage", (), {"free": 8 << 30}))
    layers = fitting_layers(tmp_path, LARGE["8b"], H200)
    assert layers is not None
    assert 1 <= layers <= 5, "4 GiB of files: 2.1 of embeddings, 0.4 of a layer"


def steps(config: RunConfig, shape: ModelShape, factors: Sequence[float]) -> list[dict[str, Any]]:
    """Records of steps whose phases take multiples of their predicted times."""
    predicted = phase_seconds(predict_step(config, shape, ONE, H100, EfficiencySection()))
    samples, length = 256, config.rollout.max_response_tokens
    records = []
    for step, factor in enumerate(factors, 1):
        seconds = {f"perf/{name}_seconds": factor * value for name, value in predicted.items() if value}
        total = sum(seconds.values())
        tokens = samples * (length + (config.planning.prompt_tokens or 0))
        records.append(
            {
                "phase": "rl",
                "step": step,
                **seconds,
                "perf/step_seconds": total,
                "perf/tokens_per_second": tokens / total,
                "response/length_mean": float(length),
                "rollout/completion_tokens": float(samples * length),
                "logprob_diff_mean": 0.001,
            }
        )
    return records


def test_a_slow_machine_misses_before_its_calibration(case: Case) -> None:
    config, shape = case.config, case.shape
    found = named(list(time_figures(case, steps(config, shape, [9.0, 2.0, 2.0, 2.0, 2.0]))))
    before, after = found["time: error of the plan"], found["time: error after calibration"]
    assert before.value == pytest.approx(0.5, abs=0.01)
    assert (before.met, after.met) == (False, True)
    assert "update: 2" in str(found["time: calibration"].value)


def test_the_calibration_has_not_seen_the_step_that_it_is_judged_by(case: Case) -> None:
    config, shape = case.config, case.shape
    found = named(list(time_figures(case, steps(config, shape, [1.0, 1.0, 2.0]))))
    assert found["time: error after calibration"].value == pytest.approx(0.5, abs=0.01)
    assert found["time: error after calibration"].met is False


def test_figures_without_goals_on_an_unknown_machine(case: Case) -> None:
    config, shape = case.config, case.shape
    records = steps(config, shape, [1.0, 2.0, 2.0, 2.0])
    figures = [
        *time_figures(replace(case, known=False), records),
        *step_figures(replace(case, known=False), records),
    ]
    assert all(figure.goal is None for figure in figures)
    assert "MFU of updates" not in named(figures)


def test_steps_are_medians_without_the_first(case: Case) -> None:
    config, shape = case.config, case.shape
    records = steps(config, shape, [50.0, 1.0, 1.0, 3.0])
    found = named(list(step_figures(case, records)))
    predicted = predict_step(config, shape, ONE, H100, EfficiencySection())
    assert found["step: update"].value == pytest.approx(predicted.phase("update").seconds)
    assert found["MFU of updates"].value == pytest.approx(predicted.mfu)
    assert found["decoded"].value == pytest.approx(256 * 768 / predicted.phase("rollout").seconds)


def test_peak_memory_is_compared_without_other_processes_use(case: Case) -> None:
    config, shape = case.config, case.shape
    plan, others = predict_memory(config, shape, ONE, H100.memory_gib), 3 * GIB
    updating = next(phase.total for phase in plan.phases if phase.name == "forward and backward")
    peaks = Peaks({"rollout": plan.peak + others, "update": updating + others - GIB}, {"update": updating - 2 * GIB})
    write_json(peaks_file(RunFolder(config.folder)), {"used": peaks.used, "allocated": peaks.allocated})
    found = named(list(memory_figures(case, others)))
    error = found["memory: error of the plan's peak"]
    assert (error.value, error.met) == (pytest.approx(0.0), True)
    assert found["memory: update"].value == pytest.approx(updating / GIB - 1)
    assert found["memory: libraries and sleeping engine"].value == pytest.approx(1.5), "1 GiB below the plan's 2.5"

    found = named(list(memory_figures(case, 0)))
    assert found["memory: error of the plan's peak"].value > 0.02


def test_without_a_gpu_memory_is_skipped_by_name(case: Case) -> None:
    assert list(memory_figures(case, None)) == [Skipped("peak memory", "needs a GPU")]


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
