"""Phases of a run over their prediction: later predictions are as long as its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlhpc.config.load import load_config
from rlhpc.config.site import EfficiencySection, PhasesSection
from rlhpc.core.errors import UserError
from rlhpc.models import read_model
from rlhpc.plan.calibrate import PHASES, calibrate, phase_seconds, read_run
from rlhpc.plan.checks.layout import check_layout
from rlhpc.plan.estimates.hardware import GPUS
from rlhpc.plan.estimates.step_time import StepTime, predict_step
from rlhpc.plan.scenario import changed_config
from rlhpc.plan.simulation import load_of

ROOT = Path(__file__).parents[2]
REACHED = EfficiencySection(
    compute=0.42, launch_us=32 / 3, decode=0.56, graph_us=3.75, phases=PhasesSection(log_probs=1.5, weight_sync=2.9)
)
PASSES = {"log_probs", "reward_model"}


def case(*overrides: str) -> Any:
    config = load_config(ROOT / "configs" / "ready" / "qwen2.5-7b-math-4nodes.yaml", overrides)
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
    lines = [{"phase": "sft", "step": 1}, *({**one, "step": step} for step, one in enumerate([slow, *[record] * 3], 1))]
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"phase": "r')
    return folder


def again(phases: dict[str, float]) -> EfficiencySection:
    """Efficiency in a site file with a calibration's output."""
    return EfficiencySection.model_validate({"phases": phases})


def test_a_calibrated_prediction_is_as_long_as_the_run(tmp_path: Path) -> None:
    truth = predict_step(*case(), REACHED)
    found = calibrate(*case(), EfficiencySection(), read_run(write_run(tmp_path, truth)))
    assert found.measured.steps == 3
    assert found.measured.prompt_tokens == pytest.approx(truth.work.prompt)
    assert set(found.phases) == set(PHASES)
    predicted = predict_step(*case(), again(dict(found.phases)))
    assert predicted.seconds == pytest.approx(truth.seconds, rel=1e-3)
    for name, seconds in phase_seconds(truth).items():
        assert found.after[name] == phase_seconds(predicted)[name] == pytest.approx(seconds, rel=1e-3)
        assert not seconds or abs(found.before[name] - seconds) > 0.1 * seconds
    assert predicted.mfu == pytest.approx(truth.mfu, rel=1e-3)


@pytest.mark.parametrize("other", [("actor.parallel={pp: 2}",), ("actor.parallel.tp=4", "rollout.tp=2")])
def test_other_layouts_are_predicted_within_6_percent_of_the_machines_own_figures(
    tmp_path: Path, other: tuple[str, ...]
) -> None:
    """Those that a fit of each figure would find, from a run of one layout."""
    found = calibrate(*case(), EfficiencySection(), read_run(write_run(tmp_path, predict_step(*case(), REACHED))))
    fitted = predict_step(*case(*other), REACHED).seconds
    assert predict_step(*case(*other), again(dict(found.phases))).seconds == pytest.approx(fitted, rel=0.06)
    assert predict_step(*case(*other), EfficiencySection()).seconds < 0.8 * fitted


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
    assert set(found.phases) == {"update", *PASSES}
    assert found.after["update"] == pytest.approx(seconds["update"], rel=1e-3)


def test_engines_beside_trainers_take_what_a_colocated_run_measured() -> None:
    """A rollout twice and a weight sync three times as long, in the formulas and in the simulation."""
    config, shape, _, gpu = case("placement=separate", "rollout.nodes=1", "rollout.gpu_memory_utilization=0.9")
    given = config, shape, check_layout(config, 4, shape), gpu
    efficiency = again({"rollout": 2.0, "weight_sync": 3.0})
    plain, slow = predict_step(*given, EfficiencySection()), predict_step(*given, efficiency)
    assert plain.sides is not None
    assert slow.sides is not None
    assert slow.sides.makespan == pytest.approx(2 * plain.sides.makespan)
    assert plain.sync is not None
    assert slow.sync is not None
    assert slow.sync.seconds == pytest.approx(3 * plain.sync.seconds)
    costs = [
        load_of(config, shape, step, gpu, each) for step, each in ((plain, EfficiencySection()), (slow, efficiency))
    ]
    assert costs[1].sequence_seconds == pytest.approx(2 * costs[0].sequence_seconds)


def test_each_has_its_own_phase_s_factor(tmp_path: Path) -> None:
    """Updates twice as slow as predicted, passes as predicted: 3.6 s of one kind do not make up for the other."""
    truth = predict_step(*case(), EfficiencySection())
    seconds = phase_seconds(truth)
    run = write_run(tmp_path, truth, **{"perf/update_seconds": 2 * seconds["update"]})
    found = calibrate(*case(), EfficiencySection(), read_run(run))
    assert found.phases == pytest.approx(
        {"update": 2.0, "log_probs": 1, "reward_model": 1, "rollout": 1, "weight_sync": 1}
    )


def test_a_second_calibration_multiplies_the_first(tmp_path: Path) -> None:
    truth, first = predict_step(*case(), REACHED), again({"update": 3.0, "rollout": 0.5})
    found = calibrate(*case(), first, read_run(write_run(tmp_path, truth)))
    fresh = calibrate(*case(), EfficiencySection(), read_run(tmp_path))
    assert found.phases["update"] == pytest.approx(fresh.phases["update"], rel=1e-3)
    assert found.phases["rollout"] == pytest.approx(fresh.phases["rollout"], rel=1e-3)
    assert found.before["update"] == pytest.approx(3 * fresh.before["update"])


@pytest.mark.parametrize("predicted", [True, False], ids=["not measured", "not predicted"])
def test_passes_without_a_measurement_are_like_updates(tmp_path: Path, *, predicted: bool) -> None:
    none = () if predicted else ("algorithm.kl.coefficient=0", "train.minibatches=1", "train.epochs=1")
    truth = predict_step(*case(*none), REACHED)
    assert (phase_seconds(truth)["log_probs"] > 0) == predicted
    run = write_run(tmp_path, truth, **{"perf/log_probs_seconds": None if predicted else 3.0})
    found = calibrate(*case(*none), EfficiencySection(), read_run(run)).phases
    assert found["log_probs"] == found["reward_model"] == found["update"] != 1


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
    assert "weight_sync" not in found.phases
    assert set(found.measured.seconds) == set(PHASES) - {"weight_sync", "reward_model"}


@pytest.mark.parametrize(
    "text",
    [
        "",
        '{"phase": "sft", "step": 1}\n',
        '[1]\n{"phase": "rl", "step": 1, "perf/update_seconds": 1}\n',
        '{"phase": "rl", "step": 1, "perf/update_seconds": 1, "perf/step_seconds": 1, "perf/tokens_per_second": 1, '
        '"response/length_mean": 0, "rollout/completion_tokens": 0}\n',
    ],
)
def test_a_run_without_steps_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "metrics.jsonl").write_text(text)
    for folder in (tmp_path, tmp_path / "none"):
        with pytest.raises(UserError, match=r"metrics\.jsonl: no finished RL step; name the folder of a run"):
            read_run(folder)
