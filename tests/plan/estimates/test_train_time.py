"""Parts of an update's time that a forward pass lacks, computed by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rlhpc.config.load import load_config
from rlhpc.config.training import MemorySection
from rlhpc.data.packing import pack
from rlhpc.models import read_model
from rlhpc.plan.estimates.hardware import GPUS
from rlhpc.plan.estimates.roofline import RLHPC, MachineSpeed, PhaseTime
from rlhpc.plan.estimates.train_time import Training, stage_parameters, update_time
from rlhpc.plan.estimates.workload import (
    SequenceLengths,
    StepWorkload,
    microbatches,
    repeated_flops,
    response_lengths,
    step_workload,
)
from rlhpc.sharding.layout import ParallelLayout
from tools import kernel_counts
from tools.published_table import TRANSFORMER_ENGINE

ROOT = Path(__file__).parents[3]
CONFIG = load_config(ROOT / "configs" / "ready" / "qwen2.5-0.5b-1gpu.yaml", ["planning.response_spread=0"])
SHAPE = read_model(ROOT / CONFIG.model.path)
FREE = replace(GPUS["h100"], memory_gbps=1e12, node_gbps=1e12, network_gbps=1e12, cpu_link_gbps=1e12)
ONE = CONFIG.site.efficiency.model_copy(update={"compute": 1.0, "memory": 1.0, "launch_us": 0, "message_us": 0})


def update(machine: MachineSpeed, work: StepWorkload) -> PhaseTime:
    training = Training(SHAPE, ParallelLayout(1), CONFIG.actor.parallel, machine)
    return update_time(training, work, 8192, CONFIG.actor.optimizer, MemorySection(recompute="none"), "update")


def test_attention_scores_are_computed_again() -> None:
    work = step_workload(CONFIG)
    found = update(MachineSpeed(FREE, ONE, 1), work)
    lengths = SequenceLengths.of([round(work.length)] * work.samples)
    seconds = (found.flops + repeated_flops(SHAPE, MemorySection(recompute="none"), lengths)) / FREE.tflops / 1e12
    assert found.parts["compute"] == pytest.approx(seconds, rel=1e-4)


def test_a_microbatch_adds_to_every_gradient() -> None:
    work = step_workload(CONFIG)
    machine = MachineSpeed(GPUS["h100"], ONE, 1)
    before, after = (
        update(replace(machine, kernels=replace(RLHPC, gradient_bytes=size)), work).parts["memory"] for size in (8, 12)
    )
    count = work.updates * update(machine, work).notes["microbatches"]
    size = 4 * stage_parameters(SHAPE, ParallelLayout(1))[0].count
    assert after - before == pytest.approx(count * size / 3350e9)


def test_fused_kernels_move_less() -> None:
    work = step_workload(CONFIG)
    own, fused = (
        update(MachineSpeed(GPUS["h100"], ONE, 1, kernels), work).parts for kernels in (RLHPC, TRANSFORMER_ENGINE)
    )
    machine = MachineSpeed(GPUS["h100"], ONE, 1)
    again = machine.compute(2 * SHAPE.vocab_size * SHAPE.hidden_size * work.tokens)  # logits, in the backward pass
    assert own["compute"] - fused["compute"] == pytest.approx(again)
    passes = (RLHPC.hidden_passes - TRANSFORMER_ENGINE.hidden_passes) * SHAPE.hidden_size
    passes += (RLHPC.feed_forward_passes - TRANSFORMER_ENGINE.feed_forward_passes) * SHAPE.ffn_size
    logits = RLHPC.logit_bytes - TRANSFORMER_ENGINE.logit_bytes
    of_token = 3 * (2 * passes * SHAPE.num_layers + logits * SHAPE.vocab_size)
    assert own["memory"] - fused["memory"] == pytest.approx(of_token * work.tokens / 3350e9)


@pytest.mark.parametrize("capacity", [1100, 1600, 4096, 8192])
def test_microbatches_are_those_of_packing(capacity: int) -> None:
    work = replace(step_workload(CONFIG), spread=0.8)
    lengths = [round(work.prompt) + length for length in response_lengths(64, work.response, work.longest, work.spread)]
    packed = len(pack(lengths, 1, capacity)[0].bins[0])
    assert packed <= microbatches(work, 64, capacity) <= packed + 1


def test_counts_of_a_layer_are_found_in_its_operators_and_bytes() -> None:
    costs, experts = {}, kernel_counts.layer_shape("30b-a3b").experts
    assert experts is not None
    for name in ("8b", "30b-a3b"):
        shape, sparse = kernel_counts.layer_shape(name), name == "30b-a3b"
        width = experts.top_k * experts.ffn_size if sparse else shape.ffn_size
        passes = RLHPC.hidden_passes * shape.hidden_size + RLHPC.feed_forward_passes * width
        passes += sparse * RLHPC.expert_passes * experts.top_k * shape.hidden_size
        size = kernel_counts.product_bytes(shape, RLHPC.gradient_bytes) + 3 * 2 * 4096 * passes
        costs[name] = (2 * RLHPC.in_layer(latent=False, experts=sparse), size)
    given = replace(RLHPC, hidden_passes=0, expert_passes=0, dense_kernels=0, expert_kernels=0)
    assert kernel_counts.layer_counts(costs, given) == RLHPC
