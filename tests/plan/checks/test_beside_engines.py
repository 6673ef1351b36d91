"""Reference and reward model on engines: refused in one line where engines cannot have them."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhpc.config.load import load_config
from rlhpc.core.errors import UserError
from rlhpc.plan.checks.beside_engines import check_shapes_beside_engines
from rlhpc.plan.checks.run import check_config, outline
from tests.helpers.plain_model import write_inputs, write_model

SEPARATE = ("placement=separate", "resources.ranks_per_node=4", "rollout.ranks=2")
REFERENCE = ("reference.on=engines", "algorithm.kl.coefficient=0.1")


def refused(config: Path, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        check_config(load_config(config, overrides))
    return str(caught.value)


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    return write_inputs(tmp_path)


def test_a_reference_on_engines_is_accepted_with_ranks_of_their_own(inputs: Path) -> None:
    found = dict(check_config(load_config(inputs, [*SEPARATE, *REFERENCE, "rollout.tp=2"])))
    assert "2 for rollout 1 engine(s) of tp 2 with the reference" in found["layout"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            REFERENCE,
            "reference.on: engines, but with placement colocated every rank has every model; leave it out, or set "
            "placement to separate",
        ),
        (
            (*SEPARATE, *REFERENCE, "train.replay={capacity: 8, max_staleness: 4}"),
            "reference.on: engines score groups once, and replayed ones are scored again in each step (train.replay); "
            "set it to trainers, or leave train.replay out",
        ),
        (
            (*SEPARATE, *REFERENCE, "reference.parallel={tp: 2}"),
            "reference.parallel: the reference model on engines has no layout of its own; leave it out, or set "
            "reference.on to judges",
        ),
    ],
)
def test_what_engines_cannot_have_is_refused(inputs: Path, overrides: tuple[str, ...], message: str) -> None:
    assert refused(inputs, *overrides) == message


def test_after_a_warm_up_only_trainers_have_the_reference(inputs: Path) -> None:
    """Engines load the model of the config, which the warm-up has changed."""
    sft = f"sft={{data: [{inputs.parent / 'train.jsonl'}], steps: 1, sequences_per_step: 8}}"
    found = refused(inputs, *SEPARATE, *REFERENCE, sft)
    assert "reference.on: engines, but after a supervised warm-up (sft) the reference is the policy that only" in found


def test_a_reward_model_is_divided_as_engines_are(inputs: Path) -> None:
    """By rollout.tp, not as the actor is among the ranks that train; a layout of its own is refused."""
    fits, odd = (write_model(inputs.parent / str(size), intermediate_size=size) for size in (128, 127))
    for model in (fits, odd):
        file = model / "config.json"
        file.write_text(file.read_text().replace("ForCausalLM", "ForSequenceClassification"))

    def found(model: Path, *more: str) -> None:
        entry = f"{{model: {model}, on: engines, own_tokenizer: false}}"
        config = load_config(inputs, [*SEPARATE, f"rewards=[{entry}]", *more])
        outline(config)
        check_shapes_beside_engines(config, None)

    found(fits, "rollout.tp=2", "actor.parallel.pp=2")
    found(odd)
    with pytest.raises(UserError) as caught:
        found(odd, "rollout.tp=2")
    assert str(caught.value) == (
        "rollout.tp: the reward model: 2 does not divide the model's 127 feed-forward size (config.json); use one of "
        "[1], or set rewards.0.on to trainers"
    )
    own = f"rewards=[{{model: {fits}, on: engines, own_tokenizer: false, parallel: {{tp: 2}}}}]"
    with pytest.raises(UserError, match=r"rewards\.0\.parallel: on engines the model is divided"):
        outline(load_config(inputs, [*SEPARATE, own]))
