"""The time of a step: figures that can be computed by hand, and what must make it longer or shorter."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlhpc.config.load import load_config
from rlhpc.config.schema import RunConfig
from rlhpc.models import ModelShape, read_model
from rlhpc.models.flops import forward_terms, training_flops
from rlhpc.plan.checks.layout import check_layout
from rlhpc.plan.estimates.hardware import GPUS, Gpu
from rlhpc.plan.estimates.memory import engine_memory
from rlhpc.plan.estimates.rollout_time import Engines, cache_tokens, rollout_time, weight_sync_time
from rlhpc.plan.estimates.roofline import MachineSpeed
from rlhpc.plan.estimates.step_time import StepTime, predict_step
from rlhpc.plan.estimates.train_time import (
    EXPERT_SPREAD,
    Training,
    _attention_messages,
    _feed_forward_messages,
    stage_parameters,
)
from rlhpc.plan.estimates.workload import response_lengths, step_workload
from rlhpc.sharding.layout import ParallelLayout
from rlhpc.sharding.shards import megatron_shards
from tools.weight_sync import report_weight_sync

ROOT = Path(__file__).parents[3]
READY = ROOT / "configs" / "ready"
SMALL, NODE, MIXED = "qwen2.5-0.5b-1gpu", "qwen2-7b-8gpus", "deepseek-v3-671b-96gpus"


def loaded(name: str, *overrides: str) -> tuple[RunConfig, ModelShape, ParallelLayout]:
    config = load_config(READY / f"{name}.yaml", overrides)
    shape = read_model(ROOT / config.model.path)
    return config, shape, check_layout(config, config.slurm.most_nodes, shape)


def step(name: str, *overrides: str, gpu: Gpu | None = None, efficiency: dict[str, Any] | None = None) -> StepTime:
    config, shape, layout = loaded(name, *overrides)
    reached = config.site.efficiency.model_copy(update=efficiency or {})
    return predict_step(config, shape, layout, gpu or GPUS[config.planning.gpu or ""], reached)


def test_updates_at_the_full_rate_have_full_utilisation() -> None:
    """With memory, links and kernels for nothing, what is left is the arithmetic of PaLM's count, and the scores of
    attention and the logits that a backward pass repeats."""
    free = replace(GPUS["h100"], memory_gbps=1e12, node_gbps=1e12, network_gbps=1e12, cpu_link_gbps=1e12)
    found = step(SMALL, gpu=free, efficiency={"compute": 1.0, "launch_us": 0, "graph_us": 0, "message_us": 0})
    config, shape, _ = loaded(SMALL)
    work = step_workload(config)
    scores = 2 * shape.num_layers * shape.num_heads * shape.head_dim * work.pairs * work.tokens
    again = scores + 2 * shape.vocab_size * shape.hidden_size * work.tokens
    assert found.mfu == pytest.approx(found.training_flops / (found.training_flops + again), rel=1e-3)
    recomputed = step(
        SMALL, "actor.memory.recompute=full", gpu=free, efficiency={"compute": 1.0, "launch_us": 0, "message_us": 0}
    )
    assert 0.7 < recomputed.mfu < 0.75  # three passes of four are counted


def test_the_arithmetic_of_an_update_is_that_of_its_samples() -> None:
    config, shape, _ = loaded(SMALL, "planning.response_spread=0")
    work = step_workload(config)
    lengths = [round(work.length)] * work.samples
    assert step(SMALL, "planning.response_spread=0").training_flops == pytest.approx(
        training_flops(shape, lengths), rel=1e-6
    )


@pytest.mark.parametrize(("name", "rank"), [(NODE, 0), (NODE, 7), (MIXED, 0), (MIXED, 50), (MIXED, 95)])
def test_weights_of_a_rank_are_those_of_its_shards(name: str, rank: int) -> None:
    _, shape, layout = loaded(name)
    exact = sum(shard.box.volume for shard in megatron_shards(shape, layout, rank, stacked=True))
    stage = layout.coord(rank)["pp"]
    assert stage_parameters(shape, layout)[stage].count == pytest.approx(
        exact, rel=0.015
    )  # routers and the way down are whole on each


@pytest.mark.parametrize("name", [NODE, "qwen2.5-7b-math-4nodes", "qwen2.5-7b-1node"])
def test_synced_bytes_are_those_of_the_plan(name: str) -> None:
    config, shape, layout = loaded(name)
    machine = MachineSpeed(GPUS["h100"], config.site.efficiency, config.resources.ranks_per_node)
    found = weight_sync_time(Engines(shape, config.rollout, machine, layout.world_size), layout)
    received = report_weight_sync(config).sizes("received")
    assert found.sent == pytest.approx(sum(received.values()) / len(received), rel=0.02)


def test_one_token_steps_read_weights_and_cache() -> None:
    """All responses of one length, all at once: so many steps of weights and keys and values through the memory."""
    config, shape, _ = loaded(
        SMALL, "planning.response_spread=0", "rollout.max_num_seqs=1000", "rollout.samples_per_prompt=1"
    )
    free = config.site.efficiency.model_copy(update={"decode": 1.0, "graph_us": 0, "compute": 1.0})
    engines = Engines(shape, config.rollout, MachineSpeed(GPUS["h100"], free, 1), 1)
    work = step_workload(config)
    found = rollout_time(engines, work)
    assert found is not None
    tokens = work.samples * (work.prompt + work.response / 2)
    per_token = 2 * 24 * 2 * 64 * 2  # keys and values of 24 layers, two heads of 64, two bytes
    size = 494e6 * 2 + tokens * per_token
    assert found.parts["memory"] == pytest.approx(work.response * size / 3350e9, rel=0.02)


def test_a_full_cache_makes_waves() -> None:
    config, shape, _ = loaded(MIXED)
    machine = MachineSpeed(GPUS["h20"], config.site.efficiency, 8)
    engines, work = Engines(shape, config.rollout, machine, 96), step_workload(config)
    found, roomy = (
        rollout_time(engines, work),
        rollout_time(replace(engines, machine=replace(machine, gpu=GPUS["h200"])), work),
    )
    assert found is not None
    assert roomy is not None
    assert found.notes["at once"] < work.samples / 3 == roomy.notes["at once"]
    assert found.notes["token steps"] > roomy.notes["token steps"] == work.longest
    assert cache_tokens(engines) < work.samples / 3 * work.length


def test_an_engine_that_does_not_fit_is_reported() -> None:
    assert not step(MIXED, "rollout.tp=8").engine_fits


@pytest.mark.parametrize(
    ("changes", "phase", "longer"),
    [
        (["actor.memory.recompute=none"], "update", False),
        (["actor.optimizer.optimizer_offload_fraction=0"], "update", False),
        (["actor.memory.offload.parameters=false"], "offload", False),
        (["rollout.cuda_graphs=false"], "rollout", True),
        (["planning.response_tokens=4000"], "rollout", True),
        (["reshard.method=gather"], "weight sync", True),
        (["actor.parallel.ep=1"], "update", True),
    ],
)
def test_what_makes_a_phase_longer(changes: list[str], phase: str, longer: bool) -> None:
    before, after = step(MIXED).phase(phase).seconds, step(MIXED, *changes).phase(phase).seconds
    assert (after > before) if longer else (after < before)


def test_virtual_stages_shorten_the_wait() -> None:
    waits = [step(NODE, *more).phase("update").parts["pipeline"] for more in ([], ["actor.parallel.vpp=2"])]
    assert waits[1] == pytest.approx(waits[0] / 2, rel=0.1)


def test_slower_links_make_a_slower_step() -> None:
    base = step(MIXED).seconds
    for field in ("tflops", "memory_gbps", "node_gbps", "network_gbps", "cpu_link_gbps"):
        slower = replace(GPUS["h20"], **{field: getattr(GPUS["h20"], field) / 2})
        assert step(MIXED, gpu=slower).seconds > base, field


def test_ppo_has_the_critics_phases() -> None:
    names = [phase.name for phase in step(SMALL, "algorithm.name=ppo").phases]
    assert names == ["weight sync", "rollout", "offload", "log-probs", "reference", "values", "critic update", "update"]


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


def test_models_beside_the_actor_take_their_own_time() -> None:
    """A critic of another size is predicted from its own shape, with a value head instead of a vocabulary."""
    model = f"critic.path={READY / 'models' / 'Qwen2.5-3B-Instruct'}"
    own, larger = (step(SMALL, "algorithm.name=ppo", *more).phase("values").flops for more in ([], [model]))
    assert larger > 5 * own
    _, shape, _ = loaded(SMALL)
    of_token = 2 * shape.hidden_size * (shape.vocab_size - 1)
    policy, value = forward_terms(shape)[0], forward_terms(shape.with_value_head)[0]
    assert policy - value == of_token
    ends = [stage_parameters(each, ParallelLayout(1))[0].count for each in (shape, shape.with_value_head)]
    assert ends[0] == ends[1], "one embedding in both: tied, and no head"
    before = step(SMALL, "reference.memory.offload=true")
    judged = step(SMALL, f"rewards=[{{model: {READY / 'models' / 'Qwen2.5-3B-Instruct'}}}]")
    assert judged.phase("reward model").flops == pytest.approx(larger)
    assert judged.phase("offload").seconds > before.phase("offload").seconds
    critics = [step(SMALL, f"algorithm.name={name}").phase("offload").seconds for name in ("grpo", "ppo")]
    assert critics[1] > 1.5 * critics[0]


def test_shared_experts_exchange_what_a_dense_layer_does() -> None:
    config, shape, layout = loaded(MIXED)
    assert shape.experts is not None
    machine = MachineSpeed(GPUS["h20"], config.site.efficiency, 8)
    training = Training(shape, layout, config.actor.parallel, machine)
    without = replace(training, shape=replace(shape, experts=replace(shape.experts, shared_ffn_size=0)))
    more, less, dense = (
        _feed_forward_messages(case, 8192, experts=experts).get("node", 0.0)
        for case, experts in ((training, True), (without, True), (training, False))
    )
    assert more == pytest.approx(less + dense)


@pytest.mark.parametrize(
    ("way", "ranks", "stride", "node", "network", "hops"),
    [
        ("ring", 1, 1, 0, 0, 0),
        ("ring", 8, 1, 1, 0, 3),
        ("ring", 4, 2, 1, 0, 2),
        ("ring", 16, 1, 0, 1 / 6, 3 + 2),  # eight adapters carry it, faster than the links between GPUs
        ("ring", 4, 4, 0, 1 / 2, 1 + 2),
        ("ring", 4, 8, 0, 1, 1 + 2 * 2),
        ("exchange", 1, 1, 0, 0, 0),
        ("exchange", 8, 1, 1, 0, 3),
        ("exchange", 16, 1, 7 / 15, 8 / 15, 3 + 2),
        ("exchange", 4, 4, 1 / 3, 2 / 3, 1 + 2),
        ("exchange", 2, 8, 0, 1, 1 + 2),
    ],
)
def test_ways_of_exchange_by_hand(way: str, ranks: int, stride: int, node: float, network: float, hops: int) -> None:
    """Nodes of eight; 60 GB, at 300 GB/s between GPUs of a node and 50 out of each; two messages of 10 us a hop."""
    gpu = replace(GPUS["h100"], node_gbps=300, network_gbps=50)
    reached = loaded(SMALL)[0].site.efficiency.model_copy(update={"node": 1.0, "network": 1.0, "message_us": 10})
    found = getattr(MachineSpeed(gpu, reached, 8), way)(60e9, ranks, stride, messages=2)
    assert found.get("node", 0.0) == pytest.approx(60 / 300 * node)
    assert found.get("network", 0.0) == pytest.approx(60 / 50 * network)
    assert found.get("messages", 0.0) == pytest.approx(2 * 10e-6 * hops)


def test_messages_of_a_layer_by_hand() -> None:
    """1024 tokens of 16 heads of 64, 4 with keys, in bfloat16; over one node's links at 1 GB/s."""
    config, shape, _ = loaded(SMALL)
    shape = replace(shape, hidden_size=1024, num_heads=16, num_kv_heads=4, head_dim=64)
    reached = config.site.efficiency.model_copy(update={"node": 1.0, "message_us": 0})
    machine = MachineSpeed(replace(GPUS["h100"], node_gbps=1), reached, 8)

    def kilobytes(
        experts: bool | None = None, method: str = "all_gather", given: ModelShape = shape, **cut: int
    ) -> float:
        parallel = config.actor.parallel.model_copy(update={"cp_method": method})
        training = Training(given, ParallelLayout(8, **cut), parallel, machine)
        parts = (
            _attention_messages(training, 1024)
            if experts is None
            else _feed_forward_messages(training, 1024, experts=experts)
        )
        assert set(parts) <= {"node", "network", "messages"}
        return parts.get("node", 0.0) * 1e9 / 1024

    whole = 2 * 1024  # kilobytes of all tokens' activations
    assert kilobytes() == 0
    assert kilobytes(tp=4) == kilobytes(False, tp=4) == pytest.approx(2 * 3 / 4 * whole)
    assert kilobytes(tp=2, cp=4) - whole / 4 == pytest.approx(2 * 3 / 4 * whole * (4 / 16) / 2), "keys and values"
    assert kilobytes(cp=4, method="ulysses") == pytest.approx(4 * 3 / 4 * whole / 4), "and queries and output"
    _, mixed, _ = loaded(MIXED)
    assert mixed.experts is not None
    eight = replace(mixed, hidden_size=1024, experts=replace(mixed.experts, top_k=8, shared_ffn_size=0))
    most = {ranks: 1 + EXPERT_SPREAD * score * (ranks / 256) ** 0.5 for ranks, score in ((4, 1.049), (8, 1.434))}
    assert kilobytes(True, given=eight, ep=8) == pytest.approx(2 * 7 / 8 * 8 * whole * most[8], rel=1e-3), "two ways"
    both = (2 * 3 / 4 * most[4] + 2) * 8 * whole / 2
    assert kilobytes(True, given=eight, tp=2, ep=4, etp=2) == pytest.approx(both, rel=1e-3)


def test_time_and_memory_tell_of_one_cache() -> None:
    config, shape, _ = loaded(MIXED)
    engines = Engines(shape, config.rollout, MachineSpeed(GPUS["h20"], config.site.efficiency, 8), 96)
    assert cache_tokens(engines) == engine_memory(config, shape, GPUS["h20"].memory_bytes).tokens
