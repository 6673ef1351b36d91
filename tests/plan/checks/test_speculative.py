"""Speculative decoding: what contradicts is refused by its key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlhpc.config.rollout import GUESSERS
from rlhpc.models import shape_of
from rlhpc.plan.checks import speculative
from rlhpc.plan.checks.absent import absent_inputs
from rlhpc.plan.estimates.engine_weights import _shape as draft_shapes
from tests.helpers.configs import least_config
from tests.helpers.machine import have_packages, lack_packages
from tests.helpers.published import MIXTRAL_8X7B, QWEN25_72B


def faults(rollout: dict[str, Any], **sections: Any) -> list[str]:
    config = least_config(rollout=rollout, **sections)
    return [str(fault) for fault in speculative.speculative_faults(config)]


def test_guesses_by_ngrams_are_taken() -> None:
    assert faults({"speculative": {}, "top_p": 0.9, "sampling": {"top_k": 5, "presence_penalty": 1.0}}) == []
    assert faults({"sampling": {"min_p": 0.1}}) == []
    assert faults({"speculative": {"arguments": {"suffix_decoding_max_tree_depth": 9}}}) == []


@pytest.mark.parametrize(
    ("rollout", "sections", "message"),
    [
        ({"sampling": {"min_p": 0.1}}, {}, "rollout.sampling.min_p: vLLM does not take it with rollout.speculative"),
        (
            {"sampling_by_source": {"code": {"logit_bias": {3: 1.0}}}},
            {},
            "rollout.sampling_by_source.code.logit_bias: vLLM does not take it",
        ),
        ({}, {"validation": {"sampling": {"min_p": 0.5}}}, "validation.sampling.min_p: vLLM does not take it"),
        (
            {"speculative": {"min_match": 5}},
            {},
            "rollout.speculative.min_match: 5 is above max_match, 4; lower it",
        ),
        (
            {"speculative": {"arguments": {"num_speculative_tokens": 3}}},
            {},
            "rollout.speculative.arguments.num_speculative_tokens: set by another key; set rollout.speculative.tokens",
        ),
        (
            {"speculative": {"arguments": {"model": "drafter"}}},
            {},
            "rollout.speculative.arguments.model: set by another key; set rollout.speculative.model",
        ),
        (
            {"speculative": {"arguments": {"use_heterogeneous_vocab": True}}},
            {},
            "rollout.speculative.arguments.use_heterogeneous_vocab: a second model is loaded as the policy is",
        ),
        (
            {"speculative": {"method": "draft_model"}},
            {},
            "rollout.speculative.model: draft_model needs a second model; set it to the model's folder",
        ),
        (
            {"speculative": {"method": "draft_model", "model": "nowhere"}},
            {},
            "rollout.speculative.model: no config.json in 'nowhere'; correct the path",
        ),
        (
            {"speculative": {"model": "drafter"}},
            {},
            "rollout.speculative.model: ngram guesses without a model; set method to draft_model, eagle or eagle3, or",
        ),
        (
            {"speculative": {"arguments": {"rejection_sample_method": "block"}}},
            {},
            "rollout.speculative.arguments.rejection_sample_method: the toolkit decides which guesses are right",
        ),
    ],
)
def test_what_contradicts_is_refused(rollout: dict[str, Any], sections: dict[str, Any], message: str) -> None:
    (fault,) = faults({"speculative": {}, **rollout}, **sections)
    assert fault.startswith(message)


@pytest.mark.parametrize(
    ("sections", "key"),
    [
        ({"placement": "separate"}, "asynchrony.schedule: deterministic"),
        ({"train": {"steps": 1, "dynamic_sampling": {"oversample": 1.5}}}, "train.dynamic_sampling.oversample"),
    ],
)
def test_suffix_is_refused_where_steps_of_engines_give_the_order(
    sections: dict[str, Any], key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    have_packages(monkeypatch, tmp_path, GUESSERS["suffix"])
    (fault,) = faults({"speculative": {"method": "suffix"}}, **sections)
    assert fault.startswith("rollout.speculative.method: what suffix guesses depends on")
    assert key in fault
    assert faults({"speculative": {"method": "suffix"}}) == []
    assert faults({"speculative": {"method": "ngram"}}, **sections) == []


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    lack_packages(monkeypatch, "numba")
    (fault,) = faults({"speculative": {}})
    assert fault.startswith("rollout.speculative.method: ngram needs the package numba, which is not installed")
    assert faults({"speculative": {}}, slurm={"conda": "other"}) == []


POLICY = shape_of(QWEN25_72B)


def of_model(folder: Path, fields: dict[str, Any], *, weights: bool = False, **rollout: Any) -> list[str]:
    """Faults of a second model with these fields for prompts with responses of 128 tokens."""
    (folder / "config.json").write_text(json.dumps(fields))
    own = {"speculative": {"method": "draft_model", "model": str(folder)}, "max_response_tokens": 64, **rollout}
    config = least_config(data={"max_prompt_tokens": 64}, rollout=own)
    assert list(speculative.speculative_faults(config)) == []
    draft_shapes.cache_clear()  # the same folder with other fields
    return [str(fault) for fault in speculative.draft_faults(config, POLICY, weights=weights)]


def test_a_second_model_reads_the_policy_s_tokens(tmp_path: Path) -> None:
    fields = {**QWEN25_72B, "max_position_embeddings": 128}
    assert of_model(tmp_path, fields) == []
    (fault,) = of_model(tmp_path, {**fields, "vocab_size": 640})
    assert fault == (
        "rollout.speculative.model: a vocabulary of 640, the policy's has 152064;"
        " use a model of the same family: both read the same tokens"
    )
    (fault,) = of_model(tmp_path, fields, max_response_tokens=65)
    assert fault.startswith("rollout.speculative.model: 128 positions, but a prompt with its response has up to 129")
    (fault,) = of_model(tmp_path, fields, tp=3)
    assert fault.startswith("rollout.tp: the second model: ")


def test_a_second_model_waits_for_each_step(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN25_72B))
    section = {"method": "draft_model", "model": str(tmp_path)}
    (fault,) = faults({"speculative": section, "engine": {"async_scheduling": True}})
    assert fault.startswith("rollout.engine.async_scheduling: guesses of a model need each step's tokens")
    assert faults({"speculative": section, "engine": {"async_scheduling": False}}) == []


def test_a_second_model_is_dense_and_complete(tmp_path: Path) -> None:
    (fault,) = of_model(tmp_path, MIXTRAL_8X7B)
    assert fault == "rollout.speculative.model: guesses are those of a dense model; use a small dense model"
    (fault,) = of_model(tmp_path, QWEN25_72B, weights=True)
    assert fault.startswith(str(tmp_path))


def test_a_second_model_s_weights_may_be_on_other_machines(tmp_path: Path) -> None:
    section = {"speculative": {"method": "draft_model", "model": str(tmp_path)}}
    config = least_config(rollout=section)
    missing = f"rollout.speculative.model: no weights in {str(tmp_path)!r} on this machine"
    assert absent_inputs(config)["draft_model"] == missing
    (tmp_path / "model.safetensors").touch()
    assert "draft_model" not in absent_inputs(config)
