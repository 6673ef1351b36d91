"""Each setting with which engines cannot be in jobs of their own is refused with its key and a remedy."""

from __future__ import annotations

import pytest

from tests.plan.checks.test_placement import SEPARATE, inputs, refused, summary  # noqa: F401 (a fixture)

REJOIN, ARRIVAL = "recovery.lost_engines=rejoin", "asynchrony.schedule=arrival"
COUNT = "slurm.rollout_jobs.count=2"
FOUR = ("resources.ranks_per_node=4", "slurm.nodes=3", "rollout.nodes=2")
RUN = (SEPARATE, REJOIN, ARRIVAL, COUNT, *FOUR)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([COUNT], "slurm.rollout_jobs: set, but with placement colocated and recovery.lost_engines restart"),
        ([*RUN, "recovery.lost_engines=restart"], "slurm.rollout_jobs: set, but with placement separate"),
        (
            [*RUN, "asynchrony.schedule=deterministic"],
            "asynchrony.schedule: deterministic, but engines of rollout jobs join at times that no order foresees",
        ),
        ([*RUN, "slurm.nodes=[3, 4]"], "slurm.nodes: [3, 4], but with slurm.rollout_jobs it is one number"),
        (
            [*RUN, "rollout.nodes=null", "rollout.ranks=8"],
            "rollout.nodes: not set, but slurm.rollout_jobs counts in nodes; set it in place of rollout.ranks",
        ),
        (
            [*RUN, "slurm.nodes=4", "rollout.nodes=3"],
            "slurm.rollout_jobs.count: 2 does not divide rollout.nodes 3; use a divisor, or set",
        ),
        (
            [*RUN, "slurm.rollout_jobs.nodes=2"],
            "slurm.rollout_jobs.nodes: 2 of each of 2 jobs are more than rollout.nodes 2; set it to 1 or less",
        ),
        ([*RUN, "rollout.tp=8"], "rollout.tp: a rollout job of 1 nodes of 4 ranks has no whole engines of 8"),
    ],
)
def test_what_cannot_have_rollout_jobs_is_refused(inputs, overrides, message):  # noqa: F811
    assert refused(inputs, *overrides).startswith(message)


@pytest.mark.parametrize("more", [(), ("slurm.nodes=4", "rollout.nodes=3", "slurm.rollout_jobs.nodes=1")])
def test_engines_may_be_in_rollout_jobs_all_or_some(inputs, more):  # noqa: F811
    summary(inputs, *RUN, *more)
