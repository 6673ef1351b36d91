"""Models on ranks of their own: what cannot work is refused in one line, with the nearest that works."""

from __future__ import annotations

import pytest

from rlhpc.config.load import load_config
from rlhpc.config.model_settings import critic_settings, models_on, reference_settings
from rlhpc.core.errors import UserError
from rlhpc.plan.checks.run import check_config, outline
from rlhpc.sharding.placement import placement_of
from tests.helpers.plain_model import write_inputs

EIGHT = ("placement=separate", "resources.ranks_per_node=8", "rollout.ranks=2")
PPO = ("algorithm.name=ppo", "algorithm.kl.coefficient=0.01")
JUDGES = (*EIGHT, *PPO, "judges.ranks=2", "critic.on=judges", "reference.on=judges")


@pytest.fixture
def inputs(tmp_path):
    return write_inputs(tmp_path)


def test_layouts_of_all_roles_are_shown(inputs) -> None:
    config = load_config(inputs, [*JUDGES, "reference.parallel={tp: 2}"])
    words = "8 ranks on 1 node(s): 4 for training tp 1 x dp 4; 2 for reference tp 2 x dp 1, critic tp 1 x dp 2; 2 for "
    for summary in (check_config(config), outline(config)):
        assert summary[0][1].startswith(words)
    roles = placement_of(config, 8)
    assert [(role.name, role.size) for role in roles.roles] == [("trainers", 4), ("judges", 2), ("engines", 2)]
    assert [roles.label(rank) for rank in (3, 4, 5, 6)] == ["trainer", "judge", "judge", "engine 0"]


def test_a_model_on_judges_has_its_own_layout_and_no_offload_of_the_actors(inputs) -> None:
    actor = ("actor.parallel={tp: 2}", "actor.memory.offload={parameters: true, optimizer: true}")
    config = load_config(inputs, [*JUDGES, *actor, "reference.parallel={pp: 2}"])
    assert reference_settings(config).parallel.pp == 2
    assert critic_settings(config).parallel.tp == 2
    assert not critic_settings(config).memory.offload.parameters
    beside = load_config(inputs, [*EIGHT, *PPO, *actor])
    assert critic_settings(beside).memory.offload.parameters


@pytest.mark.parametrize(
    ("overrides", "judges", "trainers"),
    [
        (JUDGES, ("reference", "critic"), ()),
        ((*JUDGES, "algorithm.kl.coefficient=0"), ("critic",), ()),
        ((*EIGHT, *PPO), (), ("reference", "critic")),
        ((*JUDGES, "algorithm.name=own.code:algorithm"), ("reference", "critic"), ()),
        ((*JUDGES, "train.steps=0"), (), ()),
    ],
)
def test_models_of_a_run_and_their_ranks(inputs, overrides, judges, trainers) -> None:
    config = load_config(inputs, overrides)
    assert (models_on(config, "judges"), models_on(config, "trainers")) == (judges, trainers)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            (*EIGHT, *PPO, "critic.on=judges"),
            "judges.ranks: the critic is on judges, which have no ranks; set it, such as to 1, or judges.nodes",
        ),
        (
            (*EIGHT, *PPO, "judges.ranks=2"),
            "judges.ranks: 2, but no model is on judges; leave it out, or set reference.on or critic.on to judges",
        ),
        (
            (*EIGHT, "judges.ranks=2", "reference.on=judges", "algorithm.kl.coefficient=0"),
            "judges.ranks: 2, but no model is on judges: without a KL term (algorithm.kl.coefficient 0) there is no "
            "reference model; leave it out, or set reference.on (with a KL term) to judges",
        ),
        ((*JUDGES, "judges.nodes=1"), "judges.nodes: 1, but judges.ranks is 2 already; leave one of the two out"),
        (
            (*PPO, "critic.on=judges"),
            "critic.on: judges, but with placement colocated every rank has every model; leave it out, or set",
        ),
        (
            ("judges.nodes=1",),
            "judges.nodes: 1, but with placement colocated every rank has every model; leave it out, or set",
        ),
        (
            (*EIGHT, *PPO, "reference.parallel={tp: 2}"),
            "reference.parallel: the reference model on trainers has no layout of its own; leave it out, or set "
            "reference.on to judges",
        ),
        (
            (*JUDGES, "judges.ranks=7"),
            "judges.ranks: 7 ranks of judges and 2 that generate, of the job's 8: none trains; use 5, or raise",
        ),
        (
            (*JUDGES, "judges.ranks=6", "actor.parallel.tp=2"),
            "judges.ranks: 6 ranks of judges and 2 that generate, of the job's 8: none trains; use 4, or raise",
        ),
        (
            (*JUDGES, "rollout.ranks=8"),
            "rollout.ranks: 8 of the job's 8 ranks generate, and none trains; use 5",
        ),
        (
            (*JUDGES, "judges.ranks=3", "reference.parallel={tp: 2}"),
            "reference.parallel: the reference: tp 2 x cp 1 x pp 1 = 2 ranks does not divide the 3 ranks of judges "
            "(judges.ranks); nearest that fit: tp 1 x dp 3",
        ),
        (
            (*JUDGES, "judges.ranks=3", "rollout.ranks=1", "actor.parallel.tp=2"),
            "critic.parallel: the critic: tp 2 x cp 1 x pp 1 = 2 ranks does not divide the 3 ranks of judges",
        ),
        (
            (*JUDGES, "rollout.ranks=1", "actor.parallel.tp=2"),
            "ranks does not divide the 5 ranks that train (slurm.nodes x resources.ranks_per_node without "
            "rollout.ranks and judges.ranks); nearest that fit: tp 1 x dp 5",
        ),
        (
            (*JUDGES, "judges.ranks=5", "train.minibatches=8", "train.prompts_per_step=8"),
            "judges.ranks: minibatches of 4 samples cannot feed 5 data-parallel ranks of the reference; use at most 4, "
            "or lower train.minibatches, or raise train.prompts_per_step",
        ),
    ],
)
def test_what_cannot_work_is_refused_with_a_remedy(inputs, overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError) as caught:
        check_config(load_config(inputs, overrides))
    assert message in str(caught.value)
