"""Which configurations of rewards are taken."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from rlhpc.config.load import load_config
from rlhpc.config.reward import RewardFunctionSection, RewardModelSection
from rlhpc.config.schema import RunConfig
from rlhpc.core.errors import UserError
from rlhpc.plan.checks.rewards import check_rewards

DEMO = Path(__file__).parents[2] / "configs" / "demo.yaml"


def config(*rewards: dict[str, Any]) -> RunConfig:
    data = {"name": "r", "model": {"path": "m"}, "train": {"steps": 1}}
    return RunConfig.model_validate(data | ({"rewards": list(rewards)} if rewards else {}))


def function(name: str | None = None) -> dict[str, Any]:
    return {"function": "a:b"} | ({"name": name} if name else {})


def test_one_function_or_several_and_a_model():
    assert config().rewards == [RewardFunctionSection(function="rlhpc.rewards.rules:maths")]
    taken = config(function("a"), {"model": "m"}, function("b"))
    for each in (config(), taken, config(function(), {"model": "m"}), config({"model": "m"})):
        check_rewards(each)
    assert {key: entry.name for key, entry in taken.reward_functions.items()} == {"rewards.0": "a", "rewards.2": "b"}
    assert (taken.reward_model_key, taken.reward_model) == ("rewards.1", RewardModelSection(model=Path("m")))
    assert taken.reward_model.name == "model"


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        ([function("a"), function("b"), function("a")], "rewards: 'a': duplicate name; name each differently"),
        ([function("model"), {"model": "m"}], "rewards: 'model': duplicate name; name each differently"),
        ([function("a"), function("mean")], "rewards: 'mean' has another meaning in the metrics; rename it"),
        ([function("a"), function()], "rewards.1.name: 2 functions and no name; name each"),
        ([{"model": "m"}, {"model": "n", "name": "n"}], "rewards: 2 reward models; leave one"),
    ],
)
def test_what_contradicts_itself_is_refused(rewards: list[dict[str, Any]], message: str):
    with pytest.raises(UserError) as caught:
        check_rewards(config(*rewards))
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rewards.1.name=b", "rewards.1: needs either function or model; give one of the two"),
        ("rewards.0.model=m", "rewards.0: needs either function or model; give one of the two"),
        (
            "rewards=[]",
            "rewards: [] is not allowed; allowed: a list of at least 1, each item a section of 'key: value'",
        ),
        ("rewards.0.wieght=2", "rewards.0.wieght: unknown key; did you mean 'weight'?"),
        ("rewards.0.too_long=error", "rewards.0.too_long: unknown key; valid: arguments, function, name, "),
        ("rewards=[{model: m, arguments: {}}]", "rewards.0.arguments: unknown key; valid: chat_template, max_tokens, "),
        ("rewards.0.weight=much", "rewards.0.weight: 'much' is not allowed; allowed: a number"),
    ],
)
def test_an_entry_is_either_a_function_or_a_model(override: str, message: str):
    with pytest.raises(UserError) as caught:
        load_config(DEMO, [override])
    assert re.sub(r"^\S*?demo\.yaml:\d+", "command line", str(caught.value)).startswith(f"command line: {message}")
