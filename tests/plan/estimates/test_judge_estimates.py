"""Predicted memory and time of models on ranks of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhpc.config.load import load_config
from rlhpc.config.schema import RunConfig
from rlhpc.config.training import ParallelSection
from rlhpc.models import ModelShape, read_model
from rlhpc.plan.back_ends import search_counts
from rlhpc.plan.checks.limits import check_limits
from rlhpc.plan.estimates.hardware import named_gpu, read_site
from rlhpc.plan.estimates.memory import MemoryPlan, predict_memory
from rlhpc.plan.estimates.step_time import StepTime, judge_phases, predict_step
from rlhpc.plan.estimates.train_time import Training
from rlhpc.plan.layouts import legal_layouts
from rlhpc.plan.scenario import changed_config
from rlhpc.sharding.layout import ParallelLayout, make_layout
from rlhpc.sharding.placement import training_ranks
from tests.helpers.commands import invoke

READY = Path(__file__).parents[3] / "configs" / "ready" / "qwen2.5-7b-1node.yaml"
SEPARATE = ("placement=separate", "rollout.ranks=4", "slurm.nodes=2", "algorithm.name=ppo", "actor.parallel.tp=2")
PPO = (*SEPARATE, "algorithm.kl.coefficient=0.01", "train.minibatches=1")
ON_JUDGES = ("judges.ranks=4", "reference.on=judges", "critic.on=judges")
JUDGES = (*PPO, *ON_JUDGES, "critic.parallel={tp: 2}", "reference.memory.offload=false")


def parts(*changes: str) -> tuple[RunConfig, ModelShape, ParallelLayout]:
    config = load_config(READY, changes)
    return (
        config,
        read_model(config.model.path),
        make_layout(config.actor.parallel, training_ranks(config, config.world_size)),
    )


def step_of(*changes: str) -> StepTime:
    config, shape, layout = parts(*changes)
    gpu, site = named_gpu(config, read_site(config), "h100"), read_site(config)
    assert gpu is not None
    return predict_step(config, shape, layout, gpu, site.efficiency)


def test_a_judge_has_its_models_and_a_trainer_no_longer() -> None:
    config, shape, layout = parts(*JUDGES)
    plan = predict_memory(config, shape, layout, 80.0)
    assert (layout.world_size, list(plan.by_rank), plan.judge_rank, plan.engine_rank) == (8, [0, 8, 12], 8, 12)
    phases = {phase.name: phase.parts for phase in plan.phases}
    of_judges = [name for name in phases if name.startswith("judges: ")]
    assert [phase.name for phase in plan.by_rank[8]] == of_judges
    assert {"judges: load", "judges: passes", "judges: critic optimizer step", "judges: save"} <= {*of_judges}
    for name, sizes in phases.items():
        models = {part.partition(":")[0] for part in sizes if part.startswith(("critic", "reference"))}
        assert models == ({"critic", "reference"} if name in of_judges else set())
    beside = predict_memory(*parts(*PPO, "rollout.ranks=8", "critic.parallel={tp: 2}"), 80.0)
    theirs = {phase.name: phase.parts for phase in beside.phases}["critic optimizer step"]
    ours = phases["judges: critic optimizer step"]
    assert ours["critic: weights"] == theirs["critic: weights"]
    assert "weights" in theirs
    assert "weights" not in ours


def test_a_node_has_the_cpu_memory_of_its_judges() -> None:
    cpu = predict_memory(*parts(*JUDGES), 80.0).cpu
    assert set(cpu.nodes) == {(8, 0, 0), (0, 4, 4)}
    assert cpu.judge_parts["checkpoint"] > 0
    assert cpu.node == max(8 * cpu.total, 4 * cpu.engine_total + 4 * cpu.judge_total)


def test_a_critic_of_an_algorithm_of_the_users_own_is_not_predicted() -> None:
    own = ("algorithm.name=own.code:algorithm", "algorithm.kl.coefficient=0", "judges.ranks=4", "critic.on=judges")
    plan = predict_memory(*parts(*SEPARATE, *own), 80.0)
    assert not [phase.name for phase in plan.phases if phase.name.startswith("judges")]
    assert plan.cpu.judge_parts == {}


def test_judges_that_do_not_fit_are_named(tmp_path: Path) -> None:
    config, shape, layout = parts(
        *JUDGES,
        "judges.ranks=1",
        "critic.parallel={tp: 1}",
        "reference.parallel={tp: 1}",
        "slurm.nodes=1",
        "rollout.ranks=1",
        "actor.parallel.tp=2",
        "planning.gpu=h100",
    )
    plan: MemoryPlan = predict_memory(config, shape, layout, 80.0)
    assert plan.first_too_large is not None
    assert plan.rank_of(plan.first_too_large) == 6
    (warning,) = (text for text in check_limits(config, shape, layout, starting=False) if text.startswith("memory"))
    assert "judges: " in warning
    assert "on rank 6" in warning


def test_trainers_wait_only_for_what_takes_longer_than_their_own_work() -> None:
    step, beside = step_of(*JUDGES), step_of(*PPO)
    names = [phase.name for phase in step.phases]
    assert (step.judge_ranks, step.training_ranks, step.engine_ranks) == (4, 8, 4)
    assert not {"reference", "values", "critic update"} & {*names}
    assert {"reference", "values", "critic update"} <= {phase.name for phase in beside.phases}
    config, shape, layout = parts(*JUDGES)
    judged = {phase.name: phase.seconds for phase in _judged(config, shape, layout)}
    assert step.judging == pytest.approx(sum(judged.values()))
    expected = max(0.0, judged["reference"] + judged["values"] - step.phase("log-probs").seconds)
    expected += max(0.0, judged["critic update"] - step.phase("update").seconds)
    assert expected > 0
    assert step.phase("wait for judges").seconds == pytest.approx(expected)
    assert (
        step_of(*JUDGES, "actor.parallel.tp=1", "judges.ranks=8", "slurm.nodes=3").phase("wait for judges").seconds
        < expected
    )


def _judged(config: RunConfig, shape: ModelShape, layout: ParallelLayout):
    from rlhpc.plan.estimates.roofline import MachineSpeed
    from rlhpc.plan.estimates.workload import step_workload

    site = read_site(config)
    gpu = named_gpu(config, site, "h100")
    assert gpu is not None
    machine = MachineSpeed(gpu, site.efficiency, config.resources.ranks_per_node)
    return judge_phases(config, Training(shape, layout, config.actor.parallel, machine), step_workload(config))


@pytest.mark.heavy
def test_numbers_of_gpus_keep_the_share_of_judges() -> None:
    config, shape, _ = parts(*JUDGES)
    site = read_site(config)
    gpu = named_gpu(config, site, "h100")
    assert gpu is not None
    found = search_counts(config, shape, gpu, site.efficiency, (16, 32, 64))
    shares = [(one.gpus, one.best.layout.world_size, one.best.step.judge_ranks) for one in found if one.best]
    assert shares == [(16, 8, 4), (32, 16, 8), (64, 32, 16)]


def test_a_search_leaves_out_layouts_that_judges_cannot_have_too() -> None:
    """By default their models have the actor's layout."""
    config, shape, layout = parts(*PPO, *ON_JUDGES)
    gpu = named_gpu(config, read_site(config), "h100")
    assert gpu is not None
    found = [*legal_layouts(config, shape, layout.world_size, gpu)]
    assert {found.tp * found.pp for found in found} == {1, 2, 4}
    own = changed_config(config, {name: ParallelSection(tp=2) for name in ("critic.parallel", "reference.parallel")})
    assert 8 in {found.tp * found.pp for found in legal_layouts(own, shape, layout.world_size, gpu)}


def test_the_plan_shows_judges() -> None:
    found = invoke("plan", "run", str(READY), "--gpu", "h100", *JUDGES)
    assert found.exit_code in (0, 1), found.output
    assert "4 for reference tp 2 x dp 2, critic tp 2 x dp 2" in found.output
    assert "rank 8, judges" in found.output
    (row,) = [line.split() for line in found.output.splitlines() if line.startswith("judges ")]
    assert row[1] == "4"
