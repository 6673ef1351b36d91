"""Sampling from another policy than the trained one is allowed, with a warning."""

from __future__ import annotations

from typing import Any

import pytest

from rlhpc.config.load import load_config
from rlhpc.plan.checks.run import check_config
from rlhpc.plan.checks.sampling import off_policy_warnings
from tests.helpers.configs import least_config
from tests.helpers.plain_model import write_inputs


def warnings(steps: int = 1, **sections: Any) -> list[str]:
    train = {"steps": steps, **sections.pop("train", {})}
    return [*off_policy_warnings(least_config(train=train, **sections))]


REPLAY = {"replay": {"capacity": 4}}
RESUMED = {"dynamic_sampling": {"oversample": 1.5}}
CORRECTED = {"rollout_correction": {"method": "mask"}}


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"rollout": {"temperature": 0.7}},
        {"steps": 0, "rollout": {"top_p": 0.5}},
        {"train": {"dynamic_sampling": {}}},
        {"train": REPLAY | RESUMED, "algorithm": CORRECTED},
        {"steps": 0, "train": REPLAY},
    ],
)
def test_the_sampled_policy_is_the_trained_one(sections: dict[str, Any]) -> None:
    assert warnings(**sections) == []


def test_a_truncated_distribution_is_warned_of(tmp_path) -> None:
    (text,) = warnings(rollout={"top_p": 0.95})
    assert text.startswith("rollout.top_p: 0.95 samples from a truncated distribution")
    assert "set rollout.sampling.top_k" in text
    assert "mismatch_k1" in text
    write_inputs(tmp_path)
    shown = check_config(load_config(tmp_path / "config.yaml", ["rollout.top_p=0.95"]))
    assert ("warning", text) in shown


@pytest.mark.parametrize(
    ("train", "keys"),
    [
        (REPLAY, ["train.replay"]),
        (RESUMED, ["train.dynamic_sampling.oversample"]),
        (REPLAY | RESUMED, ["train.replay", "train.dynamic_sampling.oversample"]),
    ],
)
def test_tokens_of_older_policies_without_correction_are_warned_of(train: dict[str, Any], keys: list[str]) -> None:
    texts = warnings(train=train)
    assert [text.partition(":")[0] for text in texts] == keys
    for text in texts:
        assert text.endswith("set algorithm.rollout_correction.method to truncate")
