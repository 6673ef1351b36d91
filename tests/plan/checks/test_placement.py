"""A placement that cannot work is refused in one line, with the nearest that works."""

from __future__ import annotations

import pytest

from rlhpc.config.load import load_config
from rlhpc.core.errors import DoesNotFitError, UserError
from rlhpc.plan.checks.layout import check_layout
from rlhpc.plan.checks.placement import check_placement, check_roles
from rlhpc.plan.checks.run import check_config, largest_usable, outline
from tests.helpers.commands import invoke
from tests.helpers.plain_model import write_inputs

SEPARATE, LEND = "placement=separate", "placement=lend"
EIGHT, TWO_NODES = "resources.ranks_per_node=8", "slurm.nodes=2"
PPO = "algorithm.name=ppo"


@pytest.fixture
def inputs(tmp_path):
    return write_inputs(tmp_path)


def summary(config, *overrides: str) -> list[tuple[str, str]]:
    return check_config(load_config(config, [SEPARATE, *overrides]))


def refused(config, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        check_config(load_config(config, overrides))
    return str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([EIGHT], "rollout.ranks: placement separate needs the number of ranks that generate; set it, such as to 4"),
        (
            [EIGHT, TWO_NODES],
            "rollout.ranks: placement separate needs the number of ranks that generate; set it, such as to 8, or "
            "rollout.nodes 1",
        ),
        (
            [EIGHT, "rollout.ranks=4", "rollout.nodes=1"],
            "rollout.nodes: 1, but rollout.ranks is 4 already; leave one of the two out",
        ),
        (
            ["rollout.ranks=1"],
            "placement: a job of 1 rank has none that trains beside one that generates; raise resources.ranks_per_node"
            " or slurm.nodes to 2 or more, or set it to colocated",
        ),
        ([EIGHT, "rollout.ranks=8"], "rollout.ranks: 8 of the job's 8 ranks generate, and none trains; use 7"),
        (
            [EIGHT, TWO_NODES, "rollout.nodes=3"],
            "rollout.nodes: 3 of the job's 2 nodes generate, and none trains; use 1",
        ),
        (
            [EIGHT, "rollout.ranks=9", "rollout.tp=2", "actor.parallel.tp=4"],
            "rollout.ranks: 9 of the job's 8 ranks generate, and none trains; use 4",
        ),
        (
            [EIGHT, "rollout.nodes=1"],
            "rollout.nodes: 1 of the job's 1 nodes generate, and none trains; raise resources.ranks_per_node or "
            "slurm.nodes, or lower rollout.tp or actor.parallel",
        ),
        (
            [EIGHT, "rollout.ranks=3", "rollout.tp=2"],
            "rollout.tp: engines of 2 ranks do not divide the 3 ranks that generate (rollout.ranks); use one of [1, 3],"
            " or rollout.ranks 2 or 4",
        ),
        (
            ["resources.ranks_per_node=6", TWO_NODES, "rollout.ranks=8", "rollout.tp=4"],
            "rollout.tp: of 8 ranks that generate, an engine of 4 has parts of several nodes of 6; use one of [1, 2], "
            "or rollout.ranks 4",
        ),
        (
            [EIGHT, LEND],
            "rollout.ranks: placement lend needs the number of ranks that only generate; set it, such as to 4",
        ),
        (
            [EIGHT, LEND, "rollout.ranks=2", "asynchrony.in_flight=keep"],
            "asynchrony.in_flight: keep, but requests that trainers' ranks return are recomputed (placement lend); set "
            "it to recompute, or placement to separate",
        ),
        (
            [EIGHT, "rollout.ranks=2", "asynchrony.costs.lend_seconds=3"],
            "asynchrony.costs.lend_seconds: 3, but with placement separate the trainers' ranks do not generate; leave "
            "it out, or set placement to lend",
        ),
        (
            [EIGHT, LEND, "resources.ranks_per_node=7", "rollout.ranks=2", "rollout.tp=2"],
            "rollout.tp: engines of 2 ranks do not divide the 5 ranks that train (placement lend); use one of [1], or "
            "set placement to separate",
        ),
        (
            ["resources.ranks_per_node=6", TWO_NODES, LEND, "rollout.ranks=4", "rollout.tp=4"],
            "rollout.tp: of 8 ranks that train, an engine of 4 has parts of several nodes of 6 (placement lend); use "
            "one of [1, 2], or set placement to separate",
        ),
        (
            [EIGHT, LEND, "rollout.ranks=4", "reshard.share_weights=true"],
            "reshard.share_weights: engines on ranks of their own cannot share the trainers' memory; set it to false",
        ),
        (
            [EIGHT, "rollout.ranks=3", "actor.parallel.tp=2"],
            "actor.parallel: tp 2 x cp 1 x pp 1 = 2 ranks does not divide the 5 ranks that train (slurm.nodes x "
            "resources.ranks_per_node without rollout.ranks); nearest that fit: tp 1 x dp 5",
        ),
        (
            [EIGHT, "rollout.ranks=4", PPO, "critic.parallel={tp: 8}"],
            "critic.parallel: the critic: tp 8 x cp 1 x pp 1 = 8 ranks does not divide the 4 ranks that train",
        ),
        (
            [EIGHT, "rollout.ranks=4", "train.minibatches=16"],
            "train.minibatches: minibatches of 2 samples cannot feed 4 data-parallel ranks; use 8",
        ),
        (
            [EIGHT, "slurm.nodes=[1, 3]", "rollout.nodes=1"],
            "rollout.nodes: on 1 nodes: 1 of the job's 1 nodes generate, and none trains",
        ),
        (
            [EIGHT, "slurm.nodes=[1, 2]", "rollout.ranks=9"],
            "rollout.ranks: on 1 nodes: 9 of the job's 8 ranks generate, and none trains; use 7",
        ),
        (
            [EIGHT, "rollout.ranks=5", "train.prompts_per_step=2"],
            "rollout.ranks: 5 engines, but at most 4 groups are generated at once (2 a step, asynchrony.max_staleness "
            "1); use at most 4, or raise train.prompts_per_step to 3",
        ),
        (
            [EIGHT, TWO_NODES, "rollout.nodes=1", "train.prompts_per_step=2", "asynchrony.max_staleness=0"],
            "rollout.nodes: 8 engines, but at most 2 groups are generated at once (2 a step, asynchrony.max_staleness "
            "0); raise train.prompts_per_step to 8",
        ),
        (
            [EIGHT, "rollout.ranks=4", "asynchrony.max_staleness=3"],
            "asynchrony.max_staleness: 3 is never reached in 3 steps (train.steps); use at most 2",
        ),
        (
            [EIGHT, "rollout.ranks=4", "asynchrony.costs={step_seconds: 0, sequence_seconds: 0}"],
            "asynchrony.costs.step_seconds: 0, and asynchrony.costs.sequence_seconds is 0: virtual time would stand "
            "still; set one of them to 1e-09 or more, or leave both out",
        ),
        (
            [EIGHT, "rollout.ranks=4", "asynchrony.costs.train_seconds=1.0e-10"],
            "asynchrony.costs.train_seconds: 1e-10: virtual time would stand still; set it to 1e-09 or more, or leave",
        ),
        (
            [EIGHT, "rollout.ranks=4", "train.replay={capacity: 9, fraction: 0.05}"],
            "train.replay.fraction: 0.05 of 8 groups a step (train.prompts_per_step) is none; use at least 0.064",
        ),
        (
            [EIGHT, "rollout.ranks=4", "train.replay={capacity: 9, max_staleness: 1}"],
            "train.replay.max_staleness: 1, but groups may be 1 versions old when they are new "
            "(asynchrony.max_staleness); use at least 2",
        ),
        (
            [EIGHT, "rollout.ranks=4", "algorithm.name=remax", "train.replay={capacity: 9, max_staleness: 4}"],
            "train.replay: greedy responses to the prompts of replayed groups are not generated with placement separ",
        ),
        (
            [EIGHT, "rollout.ranks=4", "reshard.method=gather"],
            "reshard.method: gather passes whole tensors inside a rank, and engines have ranks of their own; set it to",
        ),
        (
            [EIGHT, "rollout.ranks=4", "reshard.share_weights=true"],
            "reshard.share_weights: engines on ranks of their own cannot share the trainers' memory; set it to false",
        ),
        (
            [EIGHT, "rollout.ranks=4", "reshard.delta=plain", "model.dtype=float32"],
            "reshard.delta: plain, but an update changes all elements of a model in float32; set it to off, or "
            "model.dtype to bfloat16",
        ),
        (
            [EIGHT, "rollout.ranks=4", "train.dynamic_sampling.oversample=1.5"],
            "train.dynamic_sampling.oversample: 1.5, but with placement separate asynchrony.max_staleness sets how far",
        ),
        (
            [EIGHT, "rollout.ranks=4", "train.dynamic_sampling.max_staleness=2"],
            "train.dynamic_sampling.max_staleness: 2, but with placement separate asynchrony.max_staleness sets how",
        ),
        (
            [EIGHT, "rollout.ranks=4", "train.dynamic_sampling.check_every=2"],
            "train.dynamic_sampling.check_every: 2, but with placement separate asynchrony.max_staleness sets how far",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_the_nearest(inputs, overrides, message):
    assert refused(inputs, SEPARATE, *overrides).startswith(message)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["rollout.ranks=2"],
            "rollout.ranks: 2, but with placement colocated every rank generates; leave it out, or set placement to "
            "separate",
        ),
        (
            ["reshard.delta=compressed"],
            "reshard.delta: compressed, but only engines on ranks of their own have a base to receive deltas to; leave "
            "it out, or set placement to separate",
        ),
        (["rollout.nodes=1"], "rollout.nodes: 1, but with placement colocated every rank generates; leave it out"),
        (
            ["asynchrony.max_staleness=2"],
            "asynchrony.max_staleness: 2, but placement colocated generates and trains in turn; leave it out, or set "
            "placement to separate",
        ),
        (["asynchrony.costs.tool_seconds=2"], "asynchrony.costs.tool_seconds: 2.0, but placement colocated generates"),
    ],
)
def test_keys_of_the_other_placement_are_refused(inputs, overrides, message):
    assert refused(inputs, *overrides).startswith(message)


def test_a_remedy_works(inputs):
    """Each number that a refusal names passes the checks."""
    asked = [EIGHT, "rollout.tp=2", "actor.parallel.tp=2"]
    assert "or rollout.ranks 2 or 4" in refused(inputs, SEPARATE, "rollout.ranks=3", *asked)
    for ranks in (2, 4):
        summary(inputs, *asked, f"rollout.ranks={ranks}")
    prompts = ["rollout.ranks=5", "asynchrony.max_staleness=0", "train.replay={capacity: 9, fraction: 0.5}"]
    assert "raise train.prompts_per_step to 9" in refused(inputs, SEPARATE, EIGHT, "train.prompts_per_step=4", *prompts)
    summary(inputs, EIGHT, "train.prompts_per_step=9", *prompts)


def test_both_roles_are_in_the_summary(inputs):
    rows = dict(summary(inputs, EIGHT, TWO_NODES, "rollout.ranks=4", "rollout.tp=2", "actor.parallel.tp=2"))
    assert rows["layout"] == (
        "16 ranks on 2 node(s): 12 for training tp 2 x dp 6; 4 for rollout 2 engine(s) of tp 2, staleness up to 1"
    )
    plan = dict(outline(load_config(inputs, [SEPARATE, EIGHT, "rollout.ranks=4"])))
    assert "4 for training tp 1 x dp 4; 4 for rollout 4 engine(s) of tp 1" in plan["layout"]


@pytest.mark.parametrize(
    "overrides",
    [
        [EIGHT, "rollout.ranks=4"],
        [EIGHT, TWO_NODES, "rollout.nodes=1", "rollout.tp=2"],
        [EIGHT, "rollout.ranks=3", "actor.parallel.tp=1", "train.prompts_per_step=10"],
        [EIGHT, "rollout.ranks=4", "train.dynamic_sampling={}", "train.replay={capacity: 9}"],
        [EIGHT, "rollout.ranks=4", "train.steps=1"],
        [EIGHT, "slurm.nodes=[1, 3]", "rollout.ranks=2"],
        [EIGHT, "train.steps=0", "sft={data: [], steps: 1}", "reshard.method=gather"],
    ],
)
def test_what_can_be_passes(inputs, overrides):
    summary(inputs, *overrides)


def test_tokens_of_older_versions_without_correction_are_warned_of(inputs):
    ranks = [EIGHT, "rollout.ranks=4"]
    texts = [text for topic, text in summary(inputs, *ranks) if topic == "warning"]
    assert [text.partition(":")[0] for text in texts if "older policies" in text] == ["asynchrony.max_staleness"]
    for quiet in ("asynchrony.max_staleness=0", "algorithm.rollout_correction.method=truncate"):
        rows = summary(inputs, *ranks, quiet)
        assert not [text for topic, text in rows if topic == "warning" and "older policies" in text]


def test_an_elastic_run_uses_what_both_roles_fit(inputs):
    """On each number of nodes the trainers take what the engines leave."""
    config = load_config(inputs, [SEPARATE, EIGHT, "slurm.nodes=[2, 4]", "rollout.nodes=1", "actor.parallel.tp=2"])
    check_config(config)
    assert [largest_usable(config, nodes) for nodes in (1, 2, 3, 4, 5)] == [0, 2, 3, 4, 4]
    for nodes in (2, 3, 4):
        assert check_layout(config, nodes, None).world_size == 8 * (nodes - 1)
        assert check_roles(config, 8 * nodes).engines.first == 8 * (nodes - 1)


def test_an_evaluation_has_one_world(inputs):
    """`rlhpc eval` of a run's config: no RL steps, and every rank generates."""
    config = load_config(inputs, [SEPARATE, "rollout.ranks=4", "train.steps=0"])
    check_placement(config)
    assert not check_roles(config, 2).separate


@pytest.mark.parametrize("command", [["run", "--check"], ["plan", "run"], ["submit", "--dry-run"]])
def test_commands_refuse_it_in_one_line(inputs, command):
    arguments = [*command, str(inputs), SEPARATE, EIGHT, "rollout.ranks=8"]
    with pytest.raises(UserError) as caught:
        invoke(*arguments, catch_exceptions=False)
    assert str(caught.value) == "rollout.ranks: 8 of the job's 8 ranks generate, and none trains; use 7"
    assert not isinstance(caught.value, DoesNotFitError)  # exit code 3
