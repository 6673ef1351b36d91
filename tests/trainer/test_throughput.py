"""Throughput of a step, from samples and metrics, and a role's plans by what its ranks wait for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlhpc.api import Sample
from rlhpc.data.packing import sample_costs
from rlhpc.models import ModelShape, read_model, shape_of
from rlhpc.models.flops import forward_flops, forward_terms, training_flops
from rlhpc.sharding.layout import MICROBATCH_TOKENS, ParallelLayout
from rlhpc.trainer.roles import Role
from rlhpc.trainer.step_data import StepData
from rlhpc.trainer.throughput import Throughput
from tests.helpers.balance_table import CAPACITY, drawn
from tests.helpers.configs import least_config
from tests.helpers.plain_model import FIELDS, write_model
from tests.plan.estimates.test_step_flops import LENGTHS


@pytest.fixture
def shape() -> ModelShape:
    return shape_of(FIELDS)


def make_sample(prompt_id: int, prompt: int, response: int) -> Sample:
    tokens, log_probs = np.zeros(prompt + response, np.int32), np.zeros(response, np.float32)
    return Sample(prompt_id, prompt_id, tokens, prompt, log_probs, 1.0, 0, truncated=False)


def make_throughput(shape: ModelShape, **sections: Any) -> Throughput:
    """Of four ranks with an actor, a critic and a reward model."""
    other = replace(shape, num_layers=1).with_value_head
    roles = [SimpleNamespace(model=SimpleNamespace(shape=each)) for each in (shape, other, other)]
    models: Any = SimpleNamespace(actor=roles[0], reference=None, critic=roles[1], reward=roles[2])
    return Throughput(least_config(**sections), models, 4, "NVIDIA H100 80GB HBM3")


def test_a_phase_has_the_work_of_all_its_models(shape: ModelShape) -> None:
    samples = [make_sample(0, 2, 3), make_sample(1, 4, 5)]
    data: Any = StepData(
        samples, {"engine_log_probs": [], "old_log_probs": [], "old_values": []}, None, samples, [7, 3]
    )  # type: ignore[arg-type]
    names = ("rollout", "reward_model", "log_probs", "update", "step")
    seconds = {f"perf/{name}_seconds": place + 1.0 for place, name in enumerate(names)}
    metrics = {**seconds, "perf/tokens_per_second": 100.0, "skipped_updates": 0.0, "critic/skipped_updates": 0.0}
    throughput = make_throughput(shape, train={"steps": 1, "epochs": 2})
    found = throughput.metrics(metrics, data, ())
    critic = replace(shape, num_layers=1).with_value_head
    sums = {
        "reward_model": forward_flops(critic, [7, 3]),
        "log_probs": forward_flops(shape, [5, 9]) + forward_flops(critic, [5, 9]),
        "update": 2 * training_flops(shape, [5, 9]) + 2 * training_flops(critic, [5, 9]),
    }
    for place, (name, flops) in enumerate(sums.items()):
        assert found[f"perf/tflops_per_gpu_{name}"] == pytest.approx(flops / (place + 2.0) / 4e12)
    assert found["perf/tokens_per_second_per_gpu_rollout"] == 8 / 4
    assert found["perf/tokens_per_second_per_gpu_update"] == 14 / 4 / 4
    assert found["perf/tokens_per_second_per_gpu"] == 25.0
    assert found["perf/mfu"] == found["perf/tflops_per_gpu"] / 989.5
    frozen = throughput.metrics({**seconds, "critic/skipped_updates": 0.0}, data, ())
    assert frozen["perf/tflops_per_gpu_update"] == pytest.approx(2 * training_flops(critic, [5, 9]) / 16e12)


def test_a_supervised_step_is_an_update_alone(shape: ModelShape) -> None:
    seconds = {"perf/step_seconds": 2.0, "perf/update_seconds": 1.0}
    found = make_throughput(shape).metrics(seconds, None, LENGTHS)
    assert found["perf/tflops_per_gpu"] == pytest.approx(training_flops(shape, LENGTHS) / 8e12)
    assert found["perf/tflops_per_gpu_update"] == pytest.approx(training_flops(shape, LENGTHS) / 4e12)
    assert make_throughput(shape).metrics({}, None, ()) == {}, "a step that trained on nothing"


def test_a_failure_is_reported_once(shape: ModelShape, capsys: pytest.CaptureFixture[str]) -> None:
    throughput = make_throughput(shape)
    for _ in range(2):
        assert throughput.metrics({"perf/step_seconds": 1.0}, None, ["x"]) == {}  # type: ignore[list-item]
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("rlhpc: warning: continuing without the metrics of throughput, which failed: TypeError")


@dataclass
class Model:
    shape: Any
    layout: ParallelLayout
    meets_in_microbatches: bool = False


@pytest.mark.parametrize("meets", [False, True])
def test_ranks_that_meet_in_microbatches_get_rows(tmp_path: Path, meets: bool) -> None:
    shape, lengths = read_model(write_model(tmp_path)), drawn(64, 1.0, 0)
    role = Role(Model(shape, ParallelLayout(world_size=4), meets), 0, CAPACITY, CAPACITY)  # type: ignore[arg-type]
    (plan,) = role.pack(lengths)
    costs = sample_costs(lengths, *forward_terms(shape))
    sums = [[sum(costs[i] for i in members) for members in rank] for rank in plan.bins]
    wait = sum(map(max, zip(*sums, strict=True))) / max(map(sum, sums))
    assert (wait < 1.001) == meets


def test_pipelines_get_more_microbatches_than_tokens_need(tmp_path: Path) -> None:
    shape, lengths = read_model(write_model(tmp_path)), drawn(128, 0.4, 0)
    counts = []
    for layout in (ParallelLayout(1), ParallelLayout(4, pp=4), ParallelLayout(16, pp=4, tp=4)):
        role = Role(Model(shape, layout), 0, CAPACITY, CAPACITY)  # type: ignore[arg-type]
        counts.append(len(role.pack(lengths)[0].bins[0]))
    assert counts[0] == -(-sum(lengths) // CAPACITY)
    assert counts[0] < counts[2] < counts[1], f"{MICROBATCH_TOKENS} tokens of each of tp ranks"
