"""Operations of a step's phases, and the metrics that follow from them and from seconds."""

from __future__ import annotations

import pytest

from rlhpc.config.training import MemorySection
from rlhpc.models import ModelShape, shape_of
from rlhpc.models.flops import forward_flops, forward_terms, training_flops
from rlhpc.plan.estimates.hardware import device_tflops
from rlhpc.plan.estimates.workload import (
    PhaseWork,
    Response,
    SequenceLengths,
    forward_work,
    rates,
    rollout_work,
    update_work,
)
from tests.helpers.configs import least_config
from tests.helpers.plain_model import FIELDS

LENGTHS = (5, 9, 2)


@pytest.fixture
def shape() -> ModelShape:
    return shape_of(FIELDS)


def test_passes_are_the_planners(shape: ModelShape) -> None:
    lengths = SequenceLengths.of(LENGTHS)
    assert (lengths.tokens, lengths.pairs) == (16, 15 + 45 + 3)
    assert forward_work(shape, lengths) == PhaseWork(forward_flops(shape, LENGTHS), 16)
    update = update_work(shape, MemorySection(), lengths, epochs=3)
    assert (update.flops, update.tokens) == (3 * training_flops(shape, LENGTHS), 16)


@pytest.mark.parametrize("shared", [True, False])
def test_an_engine_computes_each_token_but_the_last_and_heads_of_sampled_ones(shape: ModelShape, shared: bool) -> None:
    """Token by token; tokens of tools are computed and not sampled."""
    responses = [Response(0, 3, 7, 4), Response(0, 3, 5, 2), Response(1, 4, 10, 3)]
    of_token, of_pair = forward_terms(shape)
    head = 2 * shape.vocab_size * shape.hidden_size
    expected, seen = 0.0, set()
    for response in responses:
        begin = response.prompt if shared and response.prompt_id in seen else 0
        seen.add(response.prompt_id)
        for place in range(begin, response.whole - 1):
            expected += of_token - head + of_pair * (place + 1)
        expected += head * response.sampled
    found = rollout_work(shape, responses, shared_prompts=shared)
    assert (found.flops, found.tokens) == (pytest.approx(expected), 9)


def test_rates_are_over_all_gpus_and_without_a_peak_there_is_no_mfu() -> None:
    phases = {
        "rollout": PhaseWork(2e12, 100),
        "update": PhaseWork(6e12, 400, 1.5e12),
        "log_probs": PhaseWork(1e12, 400),
    }
    seconds = {"rollout": 2.0, "update": 1.0, "log_probs": 0.0, "": 4.0}
    achieved = {
        "perf/tflops_per_gpu_rollout": 0.5,
        "perf/tokens_per_second_per_gpu_rollout": 25.0,
        "perf/tflops_per_gpu_update": 3.0,
        "perf/tokens_per_second_per_gpu_update": 200.0,
        "perf/tflops_per_gpu": 9 / 8,
        "perf/recompute_fraction": 0.25,
    }
    assert rates(phases, seconds, ranks=2, peak=None) == achieved
    assert rates(phases, seconds, ranks=2, peak=10.0) == {
        **achieved,
        "perf/mfu_rollout": 0.05,
        "perf/mfu_update": pytest.approx(0.3),
        "perf/hfu_update": pytest.approx(0.375),
        "perf/mfu": pytest.approx(9 / 80),
    }
    assert rates({}, {}, 2, 10.0) == {}


def test_the_peak_is_that_of_the_device() -> None:
    h100 = "NVIDIA H100 80GB HBM3"
    assert device_tflops(least_config(), h100) == 989.5
    assert device_tflops(least_config(slurm={"gpu_type": "a100"}), h100) == 989.5, "another one than the job asked for"
    assert device_tflops(least_config(), "some other") is None
    of_site = least_config(site={"gpus": {"h100": {"tflops": 900.0}}})
    assert device_tflops(of_site, h100) == 900.0
    alike = least_config(site={"gpus": {"own": {"like": "h100", "tflops": 800.0}}}, slurm={"gpu_type": "own"})
    assert device_tflops(alike, h100) == 800.0
