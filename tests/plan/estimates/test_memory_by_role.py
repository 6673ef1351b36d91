"""Memory of ranks that train and of ranks that generate: each role has its own phases, and a node has all its ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhpc.config.load import load_config
from rlhpc.config.schema import RunConfig
from rlhpc.models import ModelShape, read_model
from rlhpc.plan.checks.limits import cache_remedy, check_limits, larger_engines
from rlhpc.plan.estimates.cpu_memory import CPU_PROCESS
from rlhpc.plan.estimates.hardware import GPUS
from rlhpc.plan.estimates.memory import GIB, MemoryPlan, engine_memory, predict_memory
from rlhpc.plan.estimates.step_time import predict_step
from rlhpc.plan.scenario import shortages
from rlhpc.sharding.layout import ParallelLayout, make_layout
from rlhpc.sharding.placement import engine_ranks
from rlhpc.sharding.shards import num_parameters
from tools.weight_sync import report_weight_sync

READY = Path(__file__).parents[3] / "configs" / "ready"
HALVES = ("placement=separate", "rollout.ranks=4")


def parts(*changes: str) -> tuple[RunConfig, ModelShape, ParallelLayout]:
    config = load_config(READY / "qwen2.5-7b-1node.yaml", changes)
    training = config.world_size - (engine_ranks(config) or 0)
    return config, read_model(config.model.path), make_layout(config.actor.parallel, training)


def phases(plan: MemoryPlan, rank: int) -> dict[str, dict[str, int]]:
    return {phase.name: phase.parts for phase in plan.by_rank[rank]}


def test_ranks_that_train_have_no_engine_and_the_others_nothing_else() -> None:
    config, shape, layout = parts(*HALVES, "rollout.gpu_memory_utilization=0.9")
    plan = predict_memory(config, shape, layout, 80.0)
    assert (layout.world_size, list(plan.by_rank), plan.engine_rank) == (4, [0, 4], 4)
    engine = engine_memory(config, shape, 80 * GIB)
    assert engine.weights + engine.cache + engine.working == int(0.9 * 80 * GIB)
    assert phases(plan, 4) == {
        "rollout": {
            "engine weights": engine.weights,
            "KV cache": engine.cache,
            "engine's passes": engine.working,
            "buckets": 2 * 256 << 20,
            "libraries": 3 << 29,
        }
    }
    alone = predict_memory(*parts("resources.ranks_per_node=4"), 80.0)
    without = {
        name: {what: size for what, size in found.items() if not what.startswith(("engine", "KV"))}
        for name, found in phases(alone, 0).items()
        if name != "rollout"
    }
    # A load is the fullest moment, which with an engine is its own start; a sync needs no buckets to receive.
    of_trainer = phases(plan, 0)
    assert of_trainer.pop("load")["weights"] == without.pop("save")["weights"] == of_trainer.pop("save")["weights"]
    assert (of_trainer.pop("weight sync")["buckets"], without.pop("weight sync")["buckets"]) == (2 << 28, 4 << 28)
    without.pop("load")
    assert of_trainer == without


def test_ranks_that_lend_have_the_memory_of_both_in_turn() -> None:
    """As ranks that do both, beside ranks that only generate."""
    changes = ("rollout.ranks=4", "rollout.gpu_memory_utilization=0.5", "rollout.max_num_seqs=256")
    config, shape, layout = parts("placement=lend", *changes)
    plan = predict_memory(config, shape, layout, 80.0)
    both = predict_memory(*parts("resources.ranks_per_node=4", *changes[1:]), 80.0)
    separate = predict_memory(*parts("placement=separate", *changes), 80.0)
    assert (plan.rank, plan.engine_rank) == (0, 4)
    assert phases(plan, 0) == phases(both, 0)
    assert phases(plan, 4) == phases(separate, 4)
    assert plan.cpu.node == separate.cpu.node
    lacks = predict_memory(*parts("placement=lend", "rollout.ranks=4", "rollout.gpu_memory_utilization=0.95"), 80.0)
    assert lacks.refused_engine is not None


@pytest.mark.parametrize(
    ("changes", "kinds"),
    [
        (HALVES, {(4, 4)}),
        (("placement=separate", "rollout.nodes=1", "slurm.nodes=3"), {(8, 0), (0, 8)}),
        (("placement=separate", "rollout.ranks=12", "slurm.nodes=2"), {(4, 4), (0, 8)}),
        (("placement=separate", "rollout.ranks=4", "slurm.nodes=2"), {(8, 0), (4, 4)}),
    ],
    ids=["halves", "nodes", "more engines", "fewer engines"],
)
def test_a_node_has_the_memory_of_all_its_ranks(changes: tuple[str, ...], kinds: set[tuple[int, int]]) -> None:
    config, shape, layout = parts(*changes, "data.max_prompt_tokens=1000", "rollout.max_response_tokens=1000")
    cpu = predict_memory(config, shape, layout, 80.0).cpu
    assert set(cpu.nodes) == kinds
    assert cpu.node == max(trains * cpu.total + generates * cpu.engine_total for trains, generates in kinds)
    # Staleness 1 lets two steps of 256 x 8 responses wait, each of 2,000 tokens of 32 bytes.
    waiting, engines = 2 * 2048 * 2000 * 32, config.world_size - layout.world_size
    assert cpu.parts["queue"] == waiting // min(8, layout.world_size)
    assert cpu.engine_parts == {
        "processes": CPU_PROCESS,
        "staged weights": 2
        * engine_memory(config, shape, None).weights,  # a version that is complete, one that arrives
        "queue": waiting // engines,
    }


def test_what_does_not_fit_is_of_the_role_that_lacks_it() -> None:
    config, shape, layout = parts(*HALVES, "rollout.gpu_memory_utilization=0.99")
    plan = predict_memory(config, shape, layout, 79.6)
    too_large = plan.first_too_large
    assert too_large is not None
    assert (too_large.name, plan.rank_of(too_large)) == ("rollout", 4)
    assert [lack.what for lack in shortages(config, shape, plan, None)] == []
    (warning,) = (
        text for text in check_limits(config, shape, layout, starting=False) if "gpu_memory_utilization" in text
    )
    assert "rank 4 has about" in warning
    assert "free beside its libraries; set it to 0.97" in warning
    small = predict_memory(config, shape, layout, 40.0).first_too_large
    assert small is not None
    assert small.role != "engines"


def test_engines_are_as_large_as_the_ranks_that_generate_allow() -> None:
    config, shape, _ = parts("placement=separate", "rollout.ranks=2", "slurm.nodes=4")
    assert list(larger_engines(config, shape)) == [2]
    assert cache_remedy(config, shape, 8.0) == (
        "take at least 4 GPUs (rollout.ranks or rollout.nodes) and set rollout.tp to 4 and "
        "rollout.gpu_memory_utilization to 0.54"
    )


def test_a_weight_sync_goes_from_the_ranks_that_train_to_the_others() -> None:
    config, shape, _ = parts("placement=separate", "rollout.nodes=1", "slurm.nodes=2")
    report = report_weight_sync(config)
    assert (report.placement.engines.ranks.stop, report.placement.num_engines, report.reaches_least) == (16, 8, True)
    assert {rank for rank, traffic in report.plan.traffic.items() if traffic.received} == set(range(8, 16))
    whole = 2 * num_parameters(shape)
    assert sum(report.sizes("received_across").values()) == pytest.approx(whole, rel=1e-3), "over the network once"
    assert sum(report.sizes("received_within").values()) == pytest.approx(7 * whole, rel=1e-3)
    cpu = predict_memory(*parts("placement=separate", "rollout.nodes=1", "slurm.nodes=2"), 80.0).cpu
    assert report.buffer_bytes == pytest.approx(cpu.engine_parts["staged weights"] + (256 << 20), rel=1e-3)
    assert {copy.target_rank for copy in report_weight_sync(config, 9).plan.copies if copy.source_rank != 9} == {9}


def test_engines_that_may_be_lost_receive_weights_by_themselves() -> None:
    words = ("placement=separate", "rollout.nodes=1", "slurm.nodes=2")
    (together, shape, layout), (apart, *_) = parts(*words), parts(*words, "recovery.lost_engines=rejoin")
    whole = 2 * num_parameters(shape)
    assert sum(report_weight_sync(apart).sizes("received_across").values()) == pytest.approx(8 * whole, rel=1e-3)
    gpu = GPUS["h100"]
    one, each = (predict_step(config, shape, layout, gpu, config.site.efficiency).sync for config in (together, apart))
    assert one is not None
    assert each is not None
    assert each.sent_across == pytest.approx(8 * one.sent_across)


def test_deltas_need_another_copy_of_what_a_trainer_sends() -> None:
    split = ("placement=separate", "rollout.nodes=1", "slurm.nodes=2")
    (off, shape, layout), (on, *_) = parts(*split), parts(*split, "reshard.delta=compressed")
    without, with_deltas = (predict_memory(config, shape, layout, 80.0).cpu for config in (off, on))
    assert with_deltas.parts["staged weights"] == 2 * without.parts["staged weights"]
    assert with_deltas.engine_parts == without.engine_parts
