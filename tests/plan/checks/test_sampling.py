"""How tokens are drawn: what each data source gets, what contradicts, and what is warned of."""

from __future__ import annotations

from typing import Any

import pytest

from rlhpc.config.load import load_config
from rlhpc.config.schema import RunConfig
from rlhpc.core.errors import UserError
from rlhpc.plan.checks.run import check_config
from rlhpc.plan.checks.sampling import sampling_faults, sampling_warnings
from rlhpc.rollout.requests import sampling_of
from tests.helpers.configs import least_config
from tests.helpers.plain_model import write_inputs


def test_sources_and_validation_replace_single_keys() -> None:
    found = least_config(
        rollout={
            "top_p": 0.9,
            "sampling": {"top_k": 50, "stop": ["a"], "logit_bias": {3: 1.0}},
            "sampling_by_source": {"code": {"stop": ["b"], "top_p": 0.5}, "maths": {"top_k": 5}, "free": {"top_k": 0}},
        },
        validation={"temperature": 0.6, "sampling": {"top_k": 7}},
    )
    train = sampling_of(found.rollout, 1.0)
    assert (train.top_p, train.options.top_k, train.options.stop) == (0.9, 50, ("a",))
    code, maths = train.by_source["code"], train.by_source["maths"]
    assert train.by_source["free"].options.top_k is None
    assert (code.top_p, code.options.top_k, code.options.stop) == (0.5, 50, ("b",))
    assert (maths.top_p, maths.options.top_k, maths.options.stop) == (0.9, 5, ("a",))
    assert code.options.logit_bias == maths.options.logit_bias == ((3, 1.0),)
    validation = sampling_of(found.rollout, 0.6, found.validation.sampling)
    assert [each.options.top_k for each in (validation, *validation.by_source.values())] == [7, 7, 7, 7]
    assert validation.by_source["code"].options.stop == ("b",)
    written = RunConfig.model_validate(found.model_dump(mode="json"))  # with every key, as in a run's folder
    assert sampling_of(written.rollout, 1.0) == train
    assert sampling_of(written.rollout, 0.6, written.validation.sampling) == validation
    greedy = sampling_of(found.rollout, 0.0)
    assert (greedy.top_p, greedy.options.top_k, greedy.options.min_p, greedy.options.stop) == (1.0, None, 0.0, ("a",))


@pytest.mark.parametrize(
    ("rollout", "keys"),
    [
        ({}, []),
        ({"top_p": 0.9, "sampling": {"top_k": 512, "min_p": 0.1, "bad_words": ["a"], "min_tokens": 2}}, []),
        ({"sampling": {"stop": ["a"], "stop_token_ids": [3]}}, []),
        ({"top_p": 0.9}, ["rollout.top_p"]),
        ({"sampling": {"top_k": 513}}, ["rollout.sampling.top_k"]),
        ({"sampling": {"min_p": 0.1, "bad_words": ["a"]}}, ["rollout.sampling.min_p", "rollout.sampling.bad_words"]),
        (
            {"sampling": {"top_k": 5, "presence_penalty": 1.0, "logit_bias": {1: 1.0}}},
            ["rollout.sampling.presence_penalty", "rollout.sampling.logit_bias"],
        ),
        ({"sampling": {"structured_output": {"regex": "a+"}}}, ["rollout.sampling.structured_output"]),
        (
            {"top_p": 0.9, "sampling": {"top_k": 5}, "sampling_by_source": {"code": {"top_k": 900}}},
            ["rollout.top_p", "rollout.sampling_by_source.code.top_k"],
        ),
    ],
)
def test_what_is_not_trained_is_warned_of(rollout: dict[str, Any], keys: list[str]) -> None:
    found = least_config(rollout=rollout)
    warnings = list(sampling_warnings(found))
    assert sorted(text.partition(":")[0] for text in warnings) == sorted(keys)
    assert all("mismatch_k1" in text for text in warnings)
    assert found.rollout.trains_what_it_samples == (not keys)


def test_what_contradicts_is_refused() -> None:
    tool = {"name": "t", "function": "a:b"}
    found = least_config(
        rollout={
            "max_response_tokens": 10,
            "tools": [tool],
            "sampling": {"min_tokens": 11, "stop": ["a"]},
            "sampling_by_source": {"code": {"train_on_stop": False, "min_tokens": 1}},
        }
    )
    faults = [str(fault) for fault in sampling_faults(found)]
    assert "rollout.sampling.min_tokens: 11 is above rollout.max_response_tokens, 10; lower it" in faults
    assert any(
        fault.startswith("rollout.sampling_by_source.code.train_on_stop: a text that ends a") for fault in faults
    )


def test_unknown_tokens_and_forms_are_refused(tmp_path) -> None:
    path = write_inputs(tmp_path)
    with pytest.raises(UserError, match=r"rollout.sampling.stop_token_ids: 16 is no token of a vocabulary of 16"):
        check_config(load_config(path, ["rollout.sampling.stop_token_ids=[3, 16]"]))
    with pytest.raises(UserError, match=r"validation.sampling.logit_bias: 99 is no token"):
        check_config(load_config(path, ["validation.sampling.logit_bias={99: 1}"]))
    with pytest.raises(
        UserError, match=r"structured_output: regex and choice is given; give one of json_schema, regex"
    ):
        check_config(load_config(path, ["rollout.sampling.structured_output={regex: a, choice: [b]}"]))
