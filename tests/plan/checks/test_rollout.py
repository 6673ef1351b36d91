"""Tools and dynamic sampling that cannot be are refused before a run."""

from __future__ import annotations

import pytest

from rlhpc.core.errors import UserError
from rlhpc.plan.checks.rollout import check_rollout
from tests.helpers.configs import least_config

TOOL = {"name": "add", "function": "my_tools:add"}


@pytest.mark.parametrize(
    ("sections", "where"),
    [
        ({"rollout": {"tools": [TOOL]}, "data": {"chat_template": False}}, "data.chat_template"),
        ({"rollout": {"tools": [TOOL, TOOL]}}, "rollout.tools"),
        ({"rollout": {"samples_per_prompt": 1}, "train": {"dynamic_sampling": {}}}, "rollout.samples_per_prompt"),
        ({"train": {"dynamic_sampling": {"arguments": {"x": 1}}}}, "train.dynamic_sampling.arguments"),
        ({"train": {"dynamic_sampling": {}}, "rewards": [{"model": "r"}]}, "train.dynamic_sampling"),
        ({"rollout": {"temperature": 2.1}}, "rollout.temperature"),
        ({"validation": {"temperature": 2.5}}, "validation.temperature"),
        ({"rollout": {"dealing": "turns", "sampling": {"stop": ["x"]}}}, "rollout.dealing"),
        (
            {"rollout": {"dealing": "turns", "sampling_by_source": {"code": {"presence_penalty": 1.0}}}},
            "rollout.dealing",
        ),
        (
            {"train": {"dynamic_sampling": {"metric": "model"}}, "rewards": [{"function": "m:f"}, {"model": "r"}]},
            "train.dynamic_sampling.metric",
        ),
    ],
)
def test_what_cannot_be_is_refused(sections, where):
    with pytest.raises(UserError) as error:
        check_rollout(least_config(**sections))
    assert error.value.where == where
    assert error.value.remedy


@pytest.mark.parametrize(
    "sections",
    [
        {"rollout": {"tools": [TOOL]}, "train": {"dynamic_sampling": {}, "replay": {"capacity": 9}}},
        {"rollout": {"samples_per_prompt": 1}, "train": {"dynamic_sampling": {"filter": "mine:keep"}}},
        {"train": {"dynamic_sampling": {}}, "rewards": [{"function": "m:f"}, {"model": "r"}]},
        {"rollout": {"temperature": 2.0, "dealing": "turns", "sampling": {"repetition_penalty": 1.1, "min_tokens": 3}}},
        {"rollout": {"dealing": "turns", "ranks": 1}, "placement": "separate"},
        {"rollout": {"sampling": {"stop": ["x"]}}},
    ],
)
def test_what_can_be_passes(sections):
    check_rollout(least_config(**sections))
