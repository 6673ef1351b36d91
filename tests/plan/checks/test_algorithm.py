"""Keys of the algorithm that contradict each other are refused in one line."""

from __future__ import annotations

from typing import Any

import pytest

from rlhpc.config.algorithm import DEFAULTS
from rlhpc.config.schema import RunConfig
from rlhpc.core.errors import UserError
from rlhpc.plan.checks.training import check_algorithm
from tests.helpers.configs import least_config


def config(samples: int = 8, steps: int = 1, step: str | None = None, **algorithm: Any) -> RunConfig:
    rollout, train = {"samples_per_prompt": samples}, {"steps": steps, "step": step}
    return least_config(rollout=rollout, train=train, algorithm=algorithm)


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        ({"name": "dapoo"}, "algorithm.name: unknown algorithm 'dapoo'; did you mean 'dapo'"),
        ({"aggregation_length": 9}, "algorithm.aggregation_length: token-mean is not divided by a constant; leave"),
        ({"name": "dapo", "kl": {"target": 0.1}}, "algorithm.kl.target: a coefficient of 0 does not adapt;"),
        (
            {"rollout_correction": {"method": "mask", "low": 2.0, "high": 1.5}},
            "algorithm.rollout_correction.low: no weight is between 2 and 1.5; set it below .*correction.high",
        ),
        ({"name": "gspo", "dual_clip": 3.0}, "algorithm.dual_clip: the loss of gspo has no dual clip; leave it out"),
        ({"gamma": 0.9}, "algorithm.gamma: grpo does not discount: .*; leave it out, or use reinforce_plus_plus"),
        ({"name": "dr_grpo", "normalise_std": True}, "algorithm.normalise_std: dr_grpo is GRPO without .*or use grpo"),
        (
            {"name": "rloo", "samples": 1},
            "rollout.samples_per_prompt: rloo compares .* there is only one.*; use at least 2",
        ),
        *(
            (
                {"name": name, "samples": 1},
                f"samples_per_prompt: {name} compares .* 2, or reinforce_plus_plus, remax or ppo",
            )
            for name in ("grpo", "dr_grpo", "dapo", "gspo", "cispo", "reinforce_plus_plus_baseline")
        ),
    ],
)
def test_a_contradiction_names_the_key_and_the_way_out(algorithm: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        check_algorithm(config(**algorithm))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", [*DEFAULTS, "my.own:ALGORITHM"])
def test_defaults_contradict_nothing(name: str) -> None:
    check_algorithm(config(name=name))


@pytest.mark.parametrize(
    "case",
    [
        {"name": "reinforce_plus_plus"},
        {"name": "remax"},
        {"name": "ppo"},
        {"name": "my.own:ALGORITHM"},
        {"name": "grpo", "steps": 0},
        {"name": "grpo", "step": "my.own:step"},
    ],
)
def test_a_single_response_is_enough_where_none_are_compared(case: dict[str, Any]) -> None:
    check_algorithm(config(samples=1, **case))


def test_an_algorithm_of_ones_own_may_use_any_key() -> None:
    check_algorithm(config(name="my.own:ALGORITHM", gamma=0.9, dual_clip=3.0, normalise_std=True))
