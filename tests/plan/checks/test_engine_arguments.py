"""Arguments of vLLM's engine that a run cannot take are refused before it, by the installed vLLM's own source."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from rlhpc.config.schema import RunConfig
from rlhpc.core.errors import UserError
from rlhpc.plan.checks import engine_arguments
from rlhpc.plan.checks.engine_arguments import engine_faults, engine_fields
from tests.helpers.configs import least_config
from tools import config_table


def faults(given: Mapping[str, Any], **slurm: Any) -> list[UserError]:
    return [*engine_faults(least_config(rollout={"engine": given}, slurm=slurm))]


def test_arguments_of_the_installed_vllm_are_taken() -> None:
    assert faults({"max_num_batched_tokens": 4096, "kv_cache_dtype": "fp8", "compilation_config": {"level": 3}}) == []


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("max_num_seqs", "rollout.engine.max_num_seqs: set by another key; set rollout.max_num_seqs"),
        ("quantization", "the trainer writes the weights"),
        ("data_parallel_size", "an engine is rollout.tp ranks"),
        ("tokenizer", "requests and responses are tokens"),
        ("logprobs_mode", "log-probs of the distribution"),
        ("speculative_config", "set by another key; set rollout.speculative"),
        ("max_num_batch_tokens", "no field of EngineArgs of the installed vLLM; did you mean 'max_num_batched_tokens'"),
        ("_api_process_count", "no field of EngineArgs"),
    ],
)
def test_others_are_refused_with_what_to_do(name: str, message: str) -> None:
    (fault,) = faults({name: 1})
    assert fault.where == f"rollout.engine.{name}"
    assert message in str(fault)


def test_what_the_toolkit_sets_are_fields_of_vllm_and_keys_of_a_run() -> None:
    """Else a refusal would be for nothing, or its remedy would not be there."""
    fields = engine_fields()
    assert fields is not None
    assert {*engine_arguments._KEYS, *engine_arguments._REASONS} <= fields
    named = {key for keys in engine_arguments._KEYS.values() for key in keys.split(" and ")}
    assert named <= {key for key, _ in config_table.keys(RunConfig.model_json_schema())}


def test_another_interpreter_s_vllm_is_not_this_one_s() -> None:
    assert faults({"no_such_field": 1}, conda="other") == []


def test_without_vllm_only_what_is_known_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_arguments, "engine_fields", lambda: None)
    assert [fault.where for fault in faults({"no_such_field": 1, "seed": 2})] == ["rollout.engine.seed"]
