"""Time of passes and updates on FSDP2: what is hidden behind computing, and what is sent, by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rlhpc.config.load import load_config
from rlhpc.config.schema import RunConfig
from rlhpc.config.training import MemorySection
from rlhpc.models import ModelShape, read_model
from rlhpc.plan.estimates.fsdp_time import FsdpTraining, make_training
from rlhpc.plan.estimates.hardware import GPUS
from rlhpc.plan.estimates.roofline import RLHPC, MachineSpeed, PhaseTime
from rlhpc.plan.estimates.step_time import predict_step
from rlhpc.plan.estimates.train_time import Training
from rlhpc.plan.estimates.workload import step_workload
from rlhpc.sharding.layout import ParallelLayout
from tools.published_table import TRANSFORMER_ENGINE

ROOT = Path(__file__).parents[3]
MESH = ("train.backend=fsdp", "actor.parallel={}", "planning.response_spread=0")
NODE = MachineSpeed(GPUS["h100"], load_config(ROOT / "configs/ready/qwen2.5-7b-1node.yaml").site.efficiency, 8)
SLOW = replace(NODE, gpu=replace(GPUS["h100"], network_gbps=0.05, node_gbps=0.05))
TOKENS = 4096


def made(*changes: str, machine: MachineSpeed = NODE, ranks: int = 8) -> tuple[RunConfig, Training]:
    config = load_config(ROOT / "configs/ready/qwen2.5-7b-1node.yaml", [*MESH, *changes])
    shape = read_model(config.model.path)
    layout = ParallelLayout(ranks, cp=config.actor.parallel.cp)
    return config, make_training(config, shape, layout, config.actor.parallel, machine)


def update(*changes: str, machine: MachineSpeed = NODE, ranks: int = 8, **memory: object) -> PhaseTime:
    config, training = made(*changes, machine=machine, ranks=ranks)
    settings = MemorySection(accumulation="reduce").model_copy(update=memory)
    return training.update_time(step_workload(config), TOKENS, config.actor.optimizer, settings, "update")


def test_one_rank_computes_as_much_as_megatron_s() -> None:
    """With the same kernels; nothing is sent."""
    config, training = made(machine=replace(NODE, kernels=TRANSFORMER_ENGINE), ranks=1)
    other = Training(training.shape, training.layout, training.parallel, training.machine)
    work, memory = step_workload(config), MemorySection(accumulation="reduce")
    ours, theirs = (
        one.update_time(work, TOKENS, config.actor.optimizer, memory, "update") for one in (training, other)
    )
    assert ours.parts["compute"] == pytest.approx(theirs.parts["compute"])
    assert ours.sent == 0


def test_modules_of_transformers_move_more_than_fused_ones() -> None:
    eager, blocks = update(), update("train.compile=blocks")
    assert eager.parts["memory"] > 1.5 * blocks.parts["memory"]
    assert eager.parts["compute"] == blocks.parts["compute"]


def test_a_fast_network_is_hidden_but_for_the_first_gather() -> None:
    config, training = made()
    assert isinstance(training, FsdpTraining)
    found = update()
    numel, count = training.groups.numel, found.notes["microbatches"] * step_workload(config).updates
    first = training.groups.root.numel + training.groups.embedding.numel + training.groups.layers[0].numel
    seconds = 2 * (7 / 8) * numel / (NODE.gpu.node_gbps * 1e9 * NODE.efficiency.node)
    assert found.parts["node"] == pytest.approx(count * seconds * first / numel, rel=0.01)


def test_a_slow_network_is_waited_for() -> None:
    """By hand: a gather forward, one backward, and the sum of float32 gradients; all else is hidden behind them."""
    found = update(machine=SLOW)
    config, training = made(machine=SLOW)
    assert isinstance(training, FsdpTraining)
    count = found.notes["microbatches"] * step_workload(config).updates
    numel = (7 / 8) * training.groups.numel
    sending = count * (2 + 2 + 4) * numel / (0.05e9 * SLOW.efficiency.node)
    computing = sum(value for name, value in found.parts.items() if name not in ("node", "messages"))
    assert found.seconds == pytest.approx(sending, rel=0.2)
    assert found.parts["node"] + computing > 0.99 * sending
    assert found.sent == pytest.approx(count * 8 * numel, rel=0.01)


def test_kept_gradients_are_sent_once_and_kept_weights_gathered_once() -> None:
    config, training = made()
    assert isinstance(training, FsdpTraining)
    numel, updates = (7 / 8) * training.groups.numel, step_workload(config).updates
    count = update().notes["microbatches"]
    kept = update(accumulation="keep")
    assert kept.sent == pytest.approx(updates * (4 * count + 4) * numel, rel=0.01)
    both = update(accumulation="keep", reshard_after_forward=False)
    assert both.sent == pytest.approx(updates * (2 * count + 4) * numel, rel=0.01)
    assert update(machine=SLOW, accumulation="keep").seconds < 0.7 * update(machine=SLOW).seconds


def test_copies_on_nodes_of_their_own_spare_the_network() -> None:
    """Sharded over 4 nodes, every gather crosses the network; with a copy on each, sums of gradients alone do."""
    slow = replace(NODE, gpu=replace(GPUS["h100"], network_gbps=0.5))
    sharded = update("slurm.nodes=4", machine=slow, ranks=32)
    copied = update("slurm.nodes=4", "actor.parallel.dp_replicate=4", machine=slow, ranks=32)
    assert copied.seconds < 0.5 * sharded.seconds


def test_sequences_are_exchanged_by_the_method_that_heads_allow() -> None:
    """Qwen2.5-7B has 28 heads: 4 ranks divide them, 8 do not."""
    ulysses, gathering = made("actor.parallel.cp=4")[1], made("actor.parallel.cp=8")[1]
    assert (ulysses.cp_method, gathering.cp_method) == ("ulysses", "all_gather")


def test_a_step_has_the_phases_of_megatron_s() -> None:
    config, training = made()
    assert isinstance(training.shape, ModelShape)
    found = predict_step(config, training.shape, training.layout, GPUS["h100"], config.site.efficiency)
    asked = load_config(ROOT / "configs/ready/qwen2.5-7b-1node.yaml")
    theirs = predict_step(asked, training.shape, ParallelLayout(8, tp=2), GPUS["h100"], asked.site.efficiency)
    assert [phase.name for phase in found.phases] == [phase.name for phase in theirs.phases]
    assert 0.7 * theirs.seconds < found.seconds < 1.5 * theirs.seconds
    assert made()[1].machine.kernels is not RLHPC
    received = found.phase("weight sync").sent
    assert received == pytest.approx(7 / 8 * 2 * 7.6e9, rel=0.01), "a rank has an eighth of what its engine needs"
