"""GRPO steps vs. the plan: sizes and figures, from fake records and peaks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

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
from bench.acceptance.results import Figure, Skipped
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
