"""What an engine of a model without a table is started with, from its files alone."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from rlhpc.config.rollout import SpeculativeSection
from rlhpc.config.schema import RolloutSection
from rlhpc.core.errors import UserError
from rlhpc.models import TensorHeader, describe_fields, read_config, read_model
from rlhpc.rollout.vllm_arguments import ServedModel, engine_arguments, prepare_speculation
from tests.helpers.plain_model import write_model

FIELDS: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-5,
}
BIAS = TensorHeader("model.layers.1.mlp.gate.e_score_correction_bias", (4,), "F32")
YARN = {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "original_max_position_embeddings": 128}


def arguments(
    folder: Path, tensors: tuple[TensorHeader, ...] = (), engine: dict[str, Any] | None = None, **changes: Any
) -> dict[str, Any]:
    fields = {**FIELDS, **changes}
    (folder / "config.json").write_text(json.dumps(fields))
    model = ServedModel(folder, describe_fields(fields, "config.json", tensors), "bfloat16", 512)
    section = RolloutSection(max_num_seqs=8, engine=engine or {})
    return engine_arguments(model, section, on_gpu=False, launched=False)


def test_fields_are_left_as_they_are(tmp_path):
    assert "hf_overrides" not in arguments(tmp_path)


def test_a_router_with_a_bias_is_vllm_s_of_deepseek(tmp_path):
    found = arguments(tmp_path, (BIAS,))
    assert found["hf_overrides"] == {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}


def test_fields_of_the_configuration_take_precedence(tmp_path):
    found = arguments(tmp_path, (BIAS,), scoring_func="softmax")
    assert found["hf_overrides"] == {"topk_method": "noaux_tc"}


@pytest.mark.parametrize("section", ["rope_parameters", "rope_scaling"])
def test_defaults_of_yarn_are_written_out(tmp_path, section):
    overrides = arguments(tmp_path, **{section: YARN})["hf_overrides"]
    assert overrides == {"rope_parameters": {**YARN, "beta_fast": 32.0, "beta_slow": 1.0}}
    given = {**YARN, "beta_fast": 16.0, "beta_slow": 2.0}
    assert "hf_overrides" not in arguments(tmp_path, **{section: given})


@pytest.mark.parametrize("section", ["rope_parameters", "rope_scaling"])
def test_longrope_beyond_the_original_length_has_long_factors_alone(tmp_path, section):
    rope = {"type": "su", "short_factor": [1.0, 1.5], "long_factor": [2.0, 3.0]}
    fields = {section: rope, "rope_theta": 5e5, "original_max_position_embeddings": 512, "partial_rotary_factor": 0.25}
    assert "hf_overrides" not in arguments(tmp_path, **fields)
    found = arguments(tmp_path, **fields | {"original_max_position_embeddings": 511})["hf_overrides"]
    wanted = {"rope_type": "longrope", "rope_theta": 5e5, "partial_rotary_factor": 0.25}
    factors = {"short_factor": [2.0, 3.0], "long_factor": [2.0, 3.0], "original_max_position_embeddings": 511}
    assert found == {"rope_parameters": {**wanted, **factors}}


def test_parameters_by_kind_of_layer_are_found_in_the_part_for_text(tmp_path):
    factors = {"short_factor": [1.0], "long_factor": [2.0], "rope_theta": 1e4, "original_max_position_embeddings": 64}
    kinds = {"full_attention": {"rope_type": "longrope", **factors}, "sliding_attention": {"rope_type": "default"}}
    found = arguments(tmp_path, text_config={"rope_parameters": kinds})["hf_overrides"]
    full = {**kinds["full_attention"], "short_factor": [2.0]}
    assert found == {"text_config": {"rope_parameters": {**kinds, "full_attention": full}}}


@pytest.mark.parametrize("known", [True, False])
def test_fixed_dynamic_rope_is_default_rope_of_more_positions(tmp_path, known):
    folder = write_model(tmp_path, model_type="qwen2")
    fields = json.loads((folder / "config.json").read_text())
    rope = {"rope_scaling": {"type": "dynamic", "factor": 2.0}, "rope_theta": 1e4, "rope_parameters": None}
    (folder / "config.json").write_text(json.dumps({**fields, **rope}))
    shape = read_model(folder, rope_tokens=5000)
    model = shape if known else describe_fields(read_config(folder, 5000), "config.json")
    served = ServedModel(folder, model, "bfloat16", 512, rope_tokens=5000)
    found = engine_arguments(served, RolloutSection(max_num_seqs=8), on_gpu=False, launched=False)["hf_overrides"]
    wanted = {"rope_type": "default", "rope_theta": shape.rope.theta}
    assert found == {"rope_parameters": wanted, "max_position_embeddings": 5000}
    assert shape.rope.theta > 1e4


def test_norms_that_vllm_computes_otherwise_are_refused(tmp_path):
    with pytest.raises(UserError, match="1e-06, but vLLM computes norms of GptOssForCausalLM with 1e-05"):
        arguments(tmp_path, rms_norm_eps=1e-6)


def test_further_arguments_are_passed_and_take_precedence(tmp_path):
    found = arguments(tmp_path, engine={"block_size": 32, "max_num_batched_tokens": 99})
    assert (found["block_size"], found["max_num_batched_tokens"], found["max_num_seqs"]) == (32, 99, 8)


def test_what_the_toolkit_sets_inside_an_argument_stays(tmp_path):
    found = arguments(tmp_path, (BIAS,), engine={"hf_overrides": {"other": 1}})
    assert found["hf_overrides"] == {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "other": 1}
    for wrong, where in (({"topk_method": "x"}, "hf_overrides.topk_method"), ("x", "hf_overrides")):
        with pytest.raises(UserError) as error:
            arguments(tmp_path, (BIAS,), engine={"hf_overrides": wrong})
        assert error.value.where == f"rollout.engine.{where}"


def test_guesses_reach_vllm_with_further_fields(tmp_path):
    section = SpeculativeSection(tokens=7, max_match=3, arguments={"disable_by_batch_size": 9})
    fields = {**FIELDS}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    model = ServedModel(tmp_path, describe_fields(fields, "config.json", ()), "bfloat16", 512)
    found = engine_arguments(model, RolloutSection(speculative=section), on_gpu=False, launched=False)
    assert found["speculative_config"] == {
        "method": "ngram",
        "num_speculative_tokens": 7,
        "prompt_lookup_min": 2,
        "prompt_lookup_max": 3,
        "disable_by_batch_size": 9,
    }


def test_a_second_model_reaches_vllm_which_then_waits_for_each_step(tmp_path):
    section = SpeculativeSection(method="draft_model", model=tmp_path / "second")
    (tmp_path / "config.json").write_text(json.dumps(FIELDS))
    model = ServedModel(tmp_path, describe_fields({**FIELDS}, "config.json", ()), "bfloat16", 512)
    found = engine_arguments(model, RolloutSection(speculative=section), on_gpu=True, launched=False)
    given = {"method": "draft_model", "num_speculative_tokens": 5, "model": str(tmp_path / "second")}
    assert found["speculative_config"] == given
    assert found["async_scheduling"] is False
    prepare_speculation(section)


def test_a_node_without_the_package_of_guesses_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "numba", None)  # as if it were not installed
    with pytest.raises(UserError, match=r"rollout.speculative.method: ngram needs the package numba, which"):
        prepare_speculation(SpeculativeSection())


def test_guesses_need_the_v1_runner(monkeypatch):
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    monkeypatch.setenv("NUMBA_NUM_THREADS", "3")
    prepare_speculation(SpeculativeSection())
    assert os.environ["VLLM_USE_V2_MODEL_RUNNER"] == "0"
    assert os.environ["NUMBA_NUM_THREADS"] == "3", "the user's"
