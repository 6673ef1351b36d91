"""Speculative decoding: what contradicts is refused by its key."""

from __future__ import annotations

from typing import Any

import pytest

from rlhpc.config.schema import RunConfig
from rlhpc.plan.checks import speculative


def faults(rollout: dict[str, Any], **sections: Any) -> list[str]:
    config = RunConfig(**{"name": "x", "model": {"path": "m"}, "train": {"steps": 1}, "rollout": rollout, **sections})
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
            {"speculative": {"shortest_match": 5}},
            {},
            "rollout.speculative.shortest_match: 5 is above longest_match, 4; lower it",
        ),
        (
            {"speculative": {"arguments": {"num_speculative_tokens": 3}}},
            {},
            "rollout.speculative.arguments.num_speculative_tokens: set by another key; set rollout.speculative.tokens",
        ),
        (
            {"speculative": {"arguments": {"model": "drafter"}}},
            {},
            "rollout.speculative.arguments.model: guesses by a second model are not supported; leave it out",
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
    sections: dict[str, Any], key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speculative, "find_spec", lambda name: name)
    (fault,) = faults({"speculative": {"method": "suffix"}}, **sections)
    assert fault.startswith("rollout.speculative.method: what suffix guesses depends on")
    assert key in fault
    assert faults({"speculative": {"method": "suffix"}}) == []
    assert faults({"speculative": {"method": "ngram"}}, **sections) == []


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculative, "find_spec", lambda name: None)
    (fault,) = faults({"speculative": {}})
    assert fault.startswith("rollout.speculative.method: ngram needs the package numba, which is not installed")
    assert faults({"speculative": {}}, slurm={"conda": "other"}) == []
