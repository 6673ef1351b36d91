"""Concurrent sequences of an engine by default: what its KV cache holds, within bounds, in every prediction."""

from __future__ import annotations

from math import ceil
from pathlib import Path

import pytest

from rlhpc.config.load import load_config
from rlhpc.config.schema import RunConfig
from rlhpc.models import ModelShape, read_model
from rlhpc.plan.estimates.hardware import GPUS
from rlhpc.plan.estimates.memory import engine_memory, engine_section
from rlhpc.plan.estimates.step_time import predict_rollout
from rlhpc.rollout.vllm_arguments import ServedModel, engine_arguments

READY = Path(__file__).parents[3] / "configs" / "ready"
GPU = GPUS["h100"]
# One node of 8 engines with 2,048 samples each.
MANY = ("train.prompts_per_step=2048", "planning.prompt_tokens=200", "data.validation=[]")


def parts(*changes: str) -> tuple[RunConfig, ModelShape]:
    config = load_config(READY / "qwen2.5-7b-1node.yaml", [*MANY, *changes])
    return config, read_model(config.model.path)


def found(*changes: str, gpu_bytes: int | None = GPU.memory_bytes) -> int:
    section = engine_section(*parts(*changes), gpu_bytes)
    assert section.max_num_seqs is not None
    return section.max_num_seqs


@pytest.mark.parametrize("changes", [(), ("rollout.kv_cache_gib=20",)], ids=["share of the GPU", "set cache"])
def test_the_cache_holds_so_many_sequences_of_the_expected_length_and_no_more(changes: tuple[str, ...]) -> None:
    config, shape = parts("planning.response_tokens=600", *changes)
    number, engine = found("planning.response_tokens=600", *changes), engine_memory(config, shape, GPU.memory_bytes)
    assert 256 < number < 1024
    each = 200 / config.rollout.samples_per_prompt + 600  # a group's prompt is in the cache once
    assert number * each <= engine.tokens
    sampling = 8 * shape.vocab_size / engine.token if not changes else 0  # of one more, in tokens of the cache
    assert number % 16 == 0  # a batch of which vLLM has a CUDA graph
    assert (number + 16) * each > engine.tokens - 16 * sampling


def test_bounds_are_those_of_before_of_vllm_and_of_a_steps_samples() -> None:
    assert found("planning.response_tokens=1") == 1024
    assert found("rollout.max_response_tokens=30000", "planning.response_tokens=20000") == 256
    short = ("planning.response_tokens=1", "train.prompts_per_step=100")
    assert found(*short) == ceil(100 / 8) * 8
    assert found(*short, "train.dynamic_sampling={oversample: 1.5}") == ceil(150 / 8) * 8
    apart = (*short, "placement=separate", "rollout.ranks=2")
    assert found(*apart, "asynchrony.max_staleness=1") == ceil(200 / 2) * 8
    assert found(*apart, "asynchrony.max_staleness=0") == ceil(100 / 2) * 8
    assert found("planning.response_tokens=1", "train.steps=0") == 1024
    assert found("train.prompts_per_step=8", "data.validation=[{path: a.jsonl}]") == 256


def test_a_set_value_stays_and_an_unknown_cache_has_the_default() -> None:
    assert found("rollout.max_num_seqs=3000", "planning.response_tokens=1") == 3000
    assert found("planning.response_tokens=1", gpu_bytes=None) == 256
    assert found("planning.response_tokens=1", "rollout.kv_cache_gib=60", gpu_bytes=None) == 1024


def test_memory_and_time_are_those_of_the_same_value_set() -> None:
    for changes in (("planning.response_tokens=600",), ("planning.response_tokens=600", "rollout.kv_cache_gib=20")):
        number = found(*changes)
        open_, given = (parts(*changes, *more) for more in ((), (f"rollout.max_num_seqs={number}",)))
        assert engine_memory(*open_, GPU.memory_bytes) == engine_memory(*given, GPU.memory_bytes)
        times = [predict_rollout(*one, 8, GPU, one[0].site.efficiency) for one in (open_, given)]
        assert times[0] == times[1]
        assert times[0] is not None
        assert times[0].notes["max_num_seqs"] == number
        before = parts(*changes, "rollout.max_num_seqs=256")
        slower = predict_rollout(*before, 8, GPU, before[0].site.efficiency)
        assert slower is not None
        assert slower.seconds > 1.1 * times[0].seconds


def test_cuda_graphs_reach_as_far_as_the_engine_decodes() -> None:
    config, shape = parts("planning.response_tokens=1")
    model = ServedModel(config.model.path, shape, "bfloat16", 2048)
    section = engine_section(config, shape, GPU.memory_bytes)
    on_gpu = engine_arguments(model, section, on_gpu=True, launched=False)
    assert on_gpu["max_num_seqs"] == 1024
    assert on_gpu["compilation_config"] == {"max_cudagraph_capture_size": 1024}
    few = engine_arguments(model, config.rollout, on_gpu=True, launched=False)
    assert "compilation_config" not in few  # vLLM's own sizes reach to 512
    eager = section.model_copy(update={"cuda_graphs": False})
    assert "compilation_config" not in engine_arguments(model, eager, on_gpu=True, launched=False)
