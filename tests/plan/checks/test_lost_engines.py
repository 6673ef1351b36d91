"""Where an engine cannot be lost alone, the setting is refused with a remedy."""

from __future__ import annotations

import pytest

from tests.plan.checks.test_placement import EIGHT, SEPARATE, inputs, refused, summary  # noqa: F401 (a fixture)

REJOIN = "recovery.lost_engines=rejoin"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([REJOIN], "recovery.lost_engines: rejoin, but with placement colocated trainers' ranks have engines too"),
        (
            [EIGHT, "placement=lend", "rollout.ranks=4", REJOIN],
            "recovery.lost_engines: rejoin, but with placement lend",
        ),
        (
            [EIGHT, SEPARATE, "rollout.ranks=4", "reference.on=engines", REJOIN],
            "reference.on: engines, but these may be lost (recovery.lost_engines rejoin)",
        ),
        (
            ["resources.ranks_per_node=7", SEPARATE, "rollout.ranks=4", "rollout.tp=4", REJOIN],
            "rollout.tp: 4 does not divide the 3 ranks before the engines",
        ),
    ],
)
def test_what_cannot_lose_engines_is_refused(inputs, overrides, message):  # noqa: F811
    assert refused(inputs, *overrides).startswith(message)


def test_a_separate_run_may_lose_engines(inputs):  # noqa: F811
    summary(inputs, EIGHT, SEPARATE, "rollout.ranks=4", REJOIN)
