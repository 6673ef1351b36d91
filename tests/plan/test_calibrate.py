"""Factors fitted to a run: those that made up its seconds come back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlhpc.config.load import load_config
from rlhpc.config.site import EfficiencySection
from rlhpc.core.errors import UserError
from rlhpc.models import read_model
from rlhpc.plan.calibrate import PHASES, calibrate, phase_seconds, read_run
from rlhpc.plan.checks.layout import check_layout
from rlhpc.plan.estimates.hardware import GPUS
from rlhpc.plan.estimates.step_time import StepTime, predict_step
from rlhpc.plan.remedies import changed_config

ROOT = Path(__file__).parents[2]
TRAINING = {"compute": 0.42, "launch_us": 32 / 3, "forward_compute": 0.28, "forward_launch_us": 16}
REACHED = EfficiencySection(**TRAINING, decode=0.56, kernel_us=33.75, graph_us=3.75, weight_sync=0.35)


def case() -> Any:
    config = load_config(ROOT / "configs" / "ready" / "qwen2.5-7b-math-4nodes.yaml")
    shape = read_model(ROOT / config.model.path)
    return config, shape, check_layout(config, 4, shape), GPUS["h100"]


def write_run(folder: Path, step: StepTime, **changes: Any) -> Path:
    """Four steps as a run records them, the first of which was slow."""
    work = step.work
    record = {
        "phase": "rl",
        "response/length_mean": work.response,
        "rollout/completion_tokens": work.response * work.samples,
        "perf/tokens_per_second": work.tokens / step.seconds,
        "perf/step_seconds": step.seconds,
        **{f"perf/{name}_seconds": seconds for name, seconds in phase_seconds(step).items()},
        **changes,
    }
    slow = {**record, "perf/update_seconds": 1e4, "perf/rollout_seconds": 1e4}
    lines = [{"phase": "sft", "step": 1}, slow, record, record, record]
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"phase": "r')
    return folder


def test_what_a_run_was_made_of_is_found_again(tmp_path: Path) -> None:
    truth = predict_step(*case(), REACHED)
    found = calibrate(*case(), EfficiencySection(), read_run(write_run(tmp_path, truth)))
    assert found.measured.steps == 3
    assert found.measured.prompt_tokens == pytest.approx(truth.work.prompt)
    assert found.efficiency.compute == pytest.approx(REACHED.compute, rel=0.02)
    assert found.efficiency.forward_compute == pytest.approx(0.28, rel=0.02)
    assert found.efficiency.decode == pytest.approx(REACHED.decode, rel=0.02)
    assert found.efficiency.weight_sync == pytest.approx(REACHED.weight_sync, rel=0.02)
    for name, seconds in phase_seconds(truth).items():
        assert found.after[name] == pytest.approx(seconds, rel=0.02)
        assert not seconds or abs(found.before[name] - seconds) > 0.1 * seconds
    assert set(found.changed) <= set(EfficiencySection.__pydantic_fields__)


def test_trainers_of_a_separate_placement_calibrate_training_alone(tmp_path: Path) -> None:
    config, shape, _, gpu = case()
    changes = {"placement": "separate", "rollout.nodes": 1, "rollout.gpu_memory_utilization": 0.9}
    config = changed_config(config, changes)
    given = config, shape, check_layout(config, 4, shape), gpu
    truth = predict_step(*given, REACHED)
    assert truth.sides is not None
    seconds = phase_seconds(truth)
    assert seconds["rollout"] == pytest.approx(truth.sides.idle_trainers * truth.seconds)
    found = calibrate(*given, EfficiencySection(), read_run(write_run(tmp_path, truth)))
    assert found.efficiency.compute == pytest.approx(REACHED.compute, rel=0.02)
    assert set(found.changed) == set(TRAINING)
    assert found.after["update"] == pytest.approx(seconds["update"], rel=0.02)


def test_a_share_is_never_more_than_all(tmp_path: Path) -> None:
    truth = predict_step(*case(), REACHED)
    run = write_run(tmp_path, truth, **{"perf/update_seconds": 1e-3, "perf/log_probs_seconds": 1e-3})
    found = calibrate(*case(), EfficiencySection(), read_run(run)).efficiency
    assert found.compute == found.forward_compute == 1.0


def test_each_is_fitted_to_its_own_phase(tmp_path: Path) -> None:
    """Updates twice as slow as predicted, passes as predicted: 3.6 s of one kind do not make up for the other."""
    truth = predict_step(*case(), EfficiencySection())
    seconds = phase_seconds(truth)
    run = write_run(tmp_path, truth, **{"perf/update_seconds": 2 * seconds["update"]})
    found = calibrate(*case(), EfficiencySection(), read_run(run))
    assert found.after["update"] == pytest.approx(2 * seconds["update"], rel=0.02)
    assert found.after["log_probs"] == pytest.approx(seconds["log_probs"], rel=0.02)
    assert found.efficiency.forward_compute == pytest.approx(EfficiencySection().compute, rel=0.02)


def test_passes_that_were_not_measured_are_as_fast_as_updates(tmp_path: Path) -> None:
    truth = predict_step(*case(), REACHED)
    run = write_run(tmp_path, truth, **{"perf/log_probs_seconds": None})
    found = calibrate(*case(), EfficiencySection(), read_run(run))
    assert found.efficiency.compute == pytest.approx(0.42, rel=0.02)
    assert {"forward_compute", "forward_launch_us"}.isdisjoint(found.changed)


def test_a_pass_that_is_not_predicted_is_fitted_to_nothing(tmp_path: Path) -> None:
    config, *others = case()
    algorithm = config.algorithm.model_copy(update={"kl": config.algorithm.kl.model_copy(update={"coefficient": 0.0})})
    once = config.train.model_copy(update={"minibatches": 1, "epochs": 1})
    config = config.model_copy(update={"algorithm": algorithm, "train": once})
    truth = predict_step(config, *others, REACHED)
    assert phase_seconds(truth)["log_probs"] == 0
    run = write_run(tmp_path, truth, **{"perf/log_probs_seconds": 3.0})
    found = calibrate(config, *others, EfficiencySection(), read_run(run))
    assert {"forward_compute", "forward_launch_us"}.isdisjoint(found.changed)


def test_a_calibration_of_both_together_is_read_as_before() -> None:
    """What was fitted before passes had factors of their own."""
    before = EfficiencySection.model_validate({"compute": 0.3, "launch_us": 20.0})
    spelled = before.model_copy(update={"forward_compute": 0.3, "forward_launch_us": 20.0})
    assert phase_seconds(predict_step(*case(), before)) == phase_seconds(predict_step(*case(), spelled))
    slower = phase_seconds(predict_step(*case(), before.model_copy(update={"forward_compute": 0.15})))
    assert slower["log_probs"] > 1.8 * phase_seconds(predict_step(*case(), before))["log_probs"]
    assert slower["update"] == phase_seconds(predict_step(*case(), before))["update"]
    assert slower["rollout"] == phase_seconds(predict_step(*case(), before))["rollout"]


def test_the_plan_counts_tokens_of_tools_as_response(tmp_path: Path) -> None:
    """Not as prompt, which data.max_prompt_tokens bounds."""
    truth = predict_step(*case(), REACHED)
    samples, sampled = truth.work.samples, 0.75 * truth.work.response
    lengths = {"response/length_mean": sampled, "rollout/completion_tokens": samples * sampled}
    run = write_run(tmp_path, truth, **lengths, **{"tools/answer_tokens_mean": 0.25 * truth.work.response})
    found = read_run(run)
    assert found.prompt_tokens == pytest.approx(truth.work.prompt)
    assert found.response_tokens == pytest.approx(truth.work.response)


def test_phases_that_are_not_measured_leave_what_is_known(tmp_path: Path) -> None:
    truth = predict_step(*case(), REACHED)
    run = write_run(tmp_path, truth)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()[:-1]]
    for line in lines:
        line.pop("perf/weight_sync_seconds", None)
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = calibrate(*case(), EfficiencySection(), read_run(run))
    assert "weight_sync" not in found.changed
    assert set(found.measured.seconds) == set(PHASES) - {"weight_sync", "reward_model"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no finished RL step"),
        ('{"phase": "sft", "step": 1}\n', "no finished"),
        ('[1]\n{"phase": "rl", "perf/update_seconds": 1}\n', "no finished"),
        (
            '{"phase": "rl", "perf/update_seconds": 1, "perf/step_seconds": 1, "perf/tokens_per_second": 1, '
            '"response/length_mean": 0, "rollout/completion_tokens": 0}\n',
            "no finished",
        ),
    ],
)
def test_a_run_without_steps_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "metrics.jsonl").write_text(text)
    with pytest.raises(UserError, match=message):
        read_run(tmp_path)
    with pytest.raises(UserError, match="name a run folder"):
        read_run(tmp_path / "none")
