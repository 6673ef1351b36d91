"""Keys of verl, TRL and NeMo-RL, and common short names, get the name of our key, wherever they stand."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhpc.config.familiar import FAMILIAR, FIXED
from rlhpc.config.load import load_config
from rlhpc.core.errors import UserError

DEMO = Path(__file__).parents[2] / "configs" / "demo.yaml"


def error_line(*overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        load_config(DEMO, overrides)
    return str(caught.value)


@pytest.mark.parametrize(
    ("key", "ours"),
    {
        "learning_rate": "actor.optimizer.learning_rate",
        "train.lr": "actor.optimizer.learning_rate",
        "actor_rollout_ref.actor.optim.lr": "actor.optimizer.learning_rate",
        "critic.optim.lr": "critic.optimizer.learning_rate",
        "sft.lr": "sft.optimizer.learning_rate",
        "num_generations": "rollout.samples_per_prompt",
        "actor_rollout_ref.rollout.n": "rollout.samples_per_prompt",
        "rollout.n": "rollout.samples_per_prompt",
        "per_device_train_batch_size": "train.tokens_per_microbatch",
        "policy.megatron_cfg.tensor_model_parallel_size": "actor.parallel.tp",
        "actor_rollout_ref.rollout.tensor_model_parallel_size": "rollout.tp",
    }.items(),
)
def test_a_familiar_key_names_ours(key: str, ours: str) -> None:
    assert f"command line: {key}: unknown key; write {ours}" in error_line(f"{key}=1").split(" | ")


@pytest.mark.parametrize("ours", dict.fromkeys(FAMILIAR.values()))
def test_the_key_that_is_named_exists(ours: str) -> None:
    assert f"{ours}: unknown key" not in error_line(f"{ours}=[[]]")


@pytest.mark.parametrize("key", FIXED)
def test_a_former_key_says_what_holds_now(key: str) -> None:
    around = ["rollout.speculative={}"] if key.startswith("rollout.speculative.") else []
    override = f"{key}=1"
    if key.startswith("observe.alerts.rules."):
        name = key.rpartition(".")[2]
        override, key = f"observe.alerts.rules=[{{metric: kl, {name}: 1}}]", f"observe.alerts.rules.0.{name}"
    place = f"command line: {key}: no longer a key: "
    assert error_line(*around, override) == f"{place}{FIXED[key.replace('.0.', '.')]}; leave it out"


def test_a_pasted_section_names_all_of_its_keys_at_once() -> None:
    pasted = "actor_rollout_ref={actor: {optim: {lr: 1, betas: 2}, clip_ratio_low: 1}, rollout: {n: 8, top_p: 1}}"
    faults = error_line(pasted).split(" | ")
    assert faults[:4] == [
        "command line: actor_rollout_ref.actor.optim.lr: unknown key; write actor.optimizer.learning_rate",
        "command line: actor_rollout_ref.actor.clip_ratio_low: unknown key; write algorithm.clip_low",
        "command line: actor_rollout_ref.rollout.n: unknown key; write rollout.samples_per_prompt",
        "command line: actor_rollout_ref.rollout.top_p: unknown key; write rollout.top_p",
    ]


def test_up_to_twenty_faults_are_shown_and_those_of_our_own_keys_first() -> None:
    faults = error_line(*(f"zz{number}=1" for number in range(25)), "train.steps=-1").split(" | ")
    assert len(faults) == 21
    assert faults[0].startswith("command line: train.steps: -1 is not allowed")
    assert faults[-1] == "and 6 more"
