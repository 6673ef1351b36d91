"""The time of a step: figures that can be reckoned by hand, and what must make it longer or shorter."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlhpc.config.load import load_config
from rlhpc.config.schema import RunConfig
from rlhpc.models import ModelShape, read_model
from rlhpc.plan.check import check_layout
from rlhpc.plan.flops import training_flops
from rlhpc.plan.hardware import GPUS, Gpu
from rlhpc.plan.layout import ParallelLayout
from rlhpc.plan.machine import Machine
from rlhpc.plan.push_report import report_push
from rlhpc.plan.rollout_time import Engines, cache_tokens, push_time, rollout_time
from rlhpc.plan.shards import megatron_shards
from rlhpc.plan.step_time import StepTime, predict_step
from rlhpc.plan.train_time import held
from rlhpc.plan.workload import response_lengths, workload_of

ROOT = Path(__file__).parents[2]
READY = ROOT / "configs" / "ready"
SMALL, NODE, MIXED = "qwen2.5-0.5b-1gpu", "qwen2-7b-8gpus", "deepseek-v3-671b-96gpus"


def loaded(name: str, *overrides: str) -> tuple[RunConfig, ModelShape, ParallelLayout]:
    config = load_config(READY / f"{name}.yaml", overrides)
    shape = read_model(ROOT / config.model.path)
    return config, shape, check_layout(config, config.slurm.most_nodes, shape)


def step(name: str, *overrides: str, gpu: Gpu | None = None, efficiency: dict[str, Any] | None = None) -> StepTime:
    config, shape, layout = loaded(name, *overrides)
    reached = config.planning.efficiency.model_copy(update=efficiency or {})
    return predict_step(config, shape, layout, gpu or GPUS[config.planning.gpu or ""], reached)


def test_updates_at_the_full_rate_have_full_utilisation() -> None:
    """With memory, links and kernels for nothing, what is left is the arithmetic of PaLM's count."""
    free = replace(GPUS["h100"], memory_gbps=1e12, node_gbps=1e12, network_gbps=1e12, host_gbps=1e12)
    found = step(SMALL, gpu=free, efficiency={"compute": 1.0, "launch_us": 0, "graph_us": 0, "message_us": 0})
    assert found.mfu == pytest.approx(1.0, rel=1e-3)
    recomputed = step(
        SMALL, "memory.recompute=full", gpu=free, efficiency={"compute": 1.0, "launch_us": 0, "message_us": 0}
    )
    assert 0.7 < recomputed.mfu < 0.82  # three passes of four are counted, and the head is not computed again


def test_the_arithmetic_of_an_update_is_that_of_its_samples() -> None:
    config, shape, _ = loaded(SMALL, "planning.response_spread=0")
    work = workload_of(config)
    lengths = [round(work.length)] * work.samples
    assert step(SMALL, "planning.response_spread=0").training_flops == pytest.approx(
        training_flops(shape, lengths), rel=1e-6
    )


@pytest.mark.parametrize(("name", "rank"), [(NODE, 0), (NODE, 7), (MIXED, 0), (MIXED, 50), (MIXED, 95)])
def test_weights_of_a_rank_are_those_of_its_shards(name: str, rank: int) -> None:
    _, shape, layout = loaded(name)
    exact = sum(shard.box.volume for shard in megatron_shards(shape, layout, rank, stacked=True))
    stage = layout.coord(rank)["pp"]
    assert held(shape, layout)[stage].count == pytest.approx(
        exact, rel=0.015
    )  # routers and the way down are whole on each


@pytest.mark.parametrize("name", [NODE, "qwen2.5-7b-math-4nodes", "qwen2.5-7b-1node"])
def test_pushed_bytes_are_those_of_the_plan(name: str) -> None:
    config, shape, layout = loaded(name)
    machine = Machine(GPUS["h100"], config.planning.efficiency, config.resources.ranks_per_node)
    found = push_time(Engines(shape, config.rollout, machine, layout.world_size), layout)
    assert found.sent == pytest.approx(report_push(config).spread("received").mean, rel=0.02)


def test_one_token_steps_read_weights_and_cache() -> None:
    """All responses of one length, all at once: so many steps of weights and keys and values through the memory."""
    config, shape, _ = loaded(
        SMALL, "planning.response_spread=0", "rollout.max_running=1000", "rollout.samples_per_prompt=1"
    )
    free = config.planning.efficiency.model_copy(update={"decode": 1.0, "graph_us": 0, "compute": 1.0})
    engines = Engines(shape, config.rollout, Machine(GPUS["h100"], free, 1), 1)
    work = workload_of(config)
    found = rollout_time(engines, work)
    assert found is not None
    tokens = work.samples * (work.prompt + work.response / 2)
    per_token = 2 * 24 * 2 * 64 * 2  # keys and values of 24 layers, two heads of 64, two bytes
    size = 494e6 * 2 + tokens * per_token
    assert found.parts["memory"] == pytest.approx(work.response * size / 3350e9, rel=0.02)


def test_a_full_cache_makes_waves() -> None:
    config, shape, _ = loaded(MIXED)
    machine = Machine(GPUS["h20"], config.planning.efficiency, 8)
    engines, work = Engines(shape, config.rollout, machine, 96), workload_of(config)
    found, roomy = (
        rollout_time(engines, work),
        rollout_time(replace(engines, machine=replace(machine, gpu=GPUS["h200"])), work),
    )
    assert found is not None
    assert roomy is not None
    assert found.notes["at once"] < work.samples / 3 == roomy.notes["at once"]
    assert found.notes["token steps"] > roomy.notes["token steps"] == work.longest
    assert cache_tokens(engines) < work.samples / 3 * work.length


def test_an_engine_that_does_not_fit_is_told() -> None:
    assert not step(MIXED, "rollout.tp=8").engine_fits


@pytest.mark.parametrize(
    ("changes", "phase", "longer"),
    [
        (["memory.recompute=none"], "update", False),
        (["train.optimizer.host_fraction=0"], "update", False),
        (["memory.offload.parameters=false"], "offload", False),
        (["rollout.cuda_graphs=false"], "rollout", True),
        (["planning.response_tokens=4000"], "rollout", True),
        (["reshard.method=gather"], "push", True),
        (["parallel.ep=1"], "update", True),
    ],
)
def test_what_makes_a_phase_longer(changes: list[str], phase: str, longer: bool) -> None:
    before, after = step(MIXED).phase(phase).seconds, step(MIXED, *changes).phase(phase).seconds
    assert (after > before) if longer else (after < before)


def test_virtual_stages_shorten_the_wait() -> None:
    waits = [step(NODE, *more).phase("update").parts["pipeline"] for more in ([], ["parallel.vpp=2"])]
    assert waits[1] == pytest.approx(waits[0] / 2, rel=0.1)


def test_slower_links_make_a_slower_step() -> None:
    base = step(MIXED).seconds
    for field in ("tflops", "memory_gbps", "node_gbps", "network_gbps", "host_gbps"):
        slower = replace(GPUS["h20"], **{field: getattr(GPUS["h20"], field) / 2})
        assert step(MIXED, gpu=slower).seconds > base, field


def test_ppo_has_the_critics_phases() -> None:
    names = [phase.name for phase in step(SMALL, "algorithm.name=ppo").phases]
    assert names == ["push", "rollout", "offload", "log-probs", "reference", "values", "critic update", "update"]


def test_lengths_have_the_mean_and_the_bound() -> None:
    for mean, longest, spread in ((300, 1024, 0.8), (1960, 9632, 0.8), (512, 1024, 0.0), (1000, 1024, 1.0)):
        lengths = response_lengths(400, mean, longest, spread)
        assert sum(lengths) / 400 == pytest.approx(mean, rel=0.01)
        assert max(lengths) <= longest
        assert sorted(lengths) == list(lengths)
    assert len(set(response_lengths(50, 512, 1024, 0.0))) == 1


def test_shares_and_sums() -> None:
    found = step(MIXED)
    assert math.isclose(sum(found.share(phase.name) for phase in found.phases), 1)
    assert found.limit in found.phase("rollout").parts
    assert found.tokens_per_second * found.seconds == pytest.approx(found.work.tokens)
