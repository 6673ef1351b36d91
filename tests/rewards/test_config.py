"""Which configurations of rewards are taken."""

from __future__ import annotations

from typing import Any

import pytest

from rlhpc.config.reward import RewardSection
from rlhpc.core.errors import UserError
from rlhpc.plan.checks.rewards import check_reward


def functions(*names: str, **more: Any) -> RewardSection:
    return RewardSection(functions=[{"name": name, "function": "a:b"} for name in names], **more)


def test_one_function_or_several():
    check_reward(functions("a", "b"))
    (single,) = RewardSection(arguments={"x": 1}).entries
    assert (single.name, single.function, single.arguments) == ("", "rlhpc.rewards.rules:maths", {"x": 1})
    assert [item.name for item in functions("a", "b").entries] == ["a", "b"]


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (functions("a", function="c:d"), "reward.functions: reward.function is given too"),
        (functions("a", arguments={"x": 1}), "reward.functions: reward.arguments is given too"),
        (functions("a", "b", "a"), "reward.functions: 'a': duplicate name"),
        (functions("a", "mean"), "reward.functions: 'mean' means something else in the metrics"),
    ],
)
def test_what_contradicts_itself_is_refused(section: RewardSection, message: str):
    with pytest.raises(UserError, match=f"^{message}"):
        check_reward(section)
