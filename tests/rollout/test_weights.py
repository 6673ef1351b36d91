"""The engine's own parameters: which they are, when they may be written, their memory, and whose it may be."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rlhpc.api import Request
from rlhpc.core.errors import UserError
from rlhpc.models import read_model
from rlhpc.rollout.vllm_requests import sampling_parameters
from rlhpc.rollout.vllm_weights import check_parameters
from rlhpc.sharding.engine_shards import EngineLayout, engine_parameters
from tests.helpers.distributed import run_ranks
from tests.helpers.tiny_models import KINDS, make_model
from tests.rollout import engines
from tests.rollout.engines import VOCAB

SHARING = ("qwen2", "qwen2_tied", "dsv3")
EXPERTS = ("mixtral", "qwen3moe", "dsv3")
BIG = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 10, "vocab_size": 16384, "head_dim": 128}
EMBEDDING = "model.embed_tokens.weight"
MIB = 1 << 20


def real_parameters(models: Path, tp: int) -> list[dict[str, dict[str, tuple[int, ...]]]]:
    """Of engines cut by tensor, and of those with experts also cut by expert."""
    found = []
    for kinds, expert_parallel in ((tuple(KINDS), False), (EXPERTS, True)):
        shapes = {}
        for kind in kinds:
            engine = engines.build(models / kind / "a", tp, expert_parallel=expert_parallel)
            shapes[kind] = dict(engine.weight_shapes())
            engine.shutdown()
        found.append(shapes)
    return found


@pytest.mark.ranks
@pytest.mark.vllm
@engines.cpu_only
@pytest.mark.parametrize("tp", [pytest.param(1, marks=pytest.mark.long), 2, pytest.param(4, marks=pytest.mark.long)])
def test_parameters_are_those_of_the_plan(models, tp):
    for whole, by_experts in run_ranks(real_parameters, tp, models, tp, timeout=900):
        for found, layout in ((whole, EngineLayout(tp)), (by_experts, EngineLayout(tp, expert_parallel=True))):
            for kind, shapes in found.items():
                assert shapes == engine_parameters(read_model(models / kind / "a"), layout), kind


def build_another(path: Path) -> str:
    """vLLM's layout and the plan's as they would be if vLLM had changed its own."""
    shape = read_model(path)
    try:
        engines.build(path, shape=replace(shape, ffn_size=2 * shape.ffn_size))
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.ranks
@pytest.mark.vllm
@engines.cpu_only
def test_an_engine_of_another_layout_is_refused(models):
    import vllm

    (message,) = run_ranks(build_another, 1, models / "llama" / "a")
    assert f"vLLM {vllm.__version__}" in message
    assert "layers.0.mlp.down_proj.weight has shape [128, 256], expected was shape [128, 512]" in message
    assert message.startswith("rollout: ")
    assert message.endswith("install a tested version of vLLM, 0.25 or 0.32")


@pytest.mark.ranks
@pytest.mark.vllm
def test_parameters_of_other_names_are_refused(models):
    pytest.importorskip("vllm")
    shape, layout = read_model(models / "qwen2_tied" / "a"), EngineLayout(2)
    sound = engine_parameters(shape, layout)
    check_parameters(sound, shape, layout)
    name = "model.layers.1.self_attn.qkv_proj.bias"
    for planted, message in (
        ({**sound, name: (96,)}, f"{name} has shape [96], expected was shape [128]"),
        ({**sound, "model.rope.scale": (1,)}, "model.rope.scale has shape [1], expected was nothing"),
        ({key: size for key, size in sound.items() if key != name}, f"{name} has nothing, expected was shape [128]"),
        ({**sound, "lm_head.weight": (128, 128)}, "tie_word_embeddings is true, but the model folder contains"),
    ):
        with pytest.raises(UserError) as caught:
            check_parameters(planted, shape, layout)
        assert message in str(caught.value)


def by_experts(models: Path, tp: int) -> dict[str, dict[str, Any]]:
    found = {}
    for family in EXPERTS:
        a, b = models / family / "a", models / family / "b"
        engine = engines.build(a, tp, expert_parallel=True)
        engines.sync(engine, b)
        loaded = engines.greedy(engine)
        engine.sleep()
        engines.write(engine, a, EngineLayout(tp, expert_parallel=True))
        other = engines.greedy(engine)
        engine.sleep()
        engines.write(engine, b, EngineLayout(tp, expert_parallel=True))
        found[family] = {"loaded": loaded, "other": other, "written": engines.greedy(engine)}
        engine.shutdown()
        found[family]["whole"] = engines.stock_greedy(b, tp)
    return found


@pytest.mark.ranks
@pytest.mark.vllm
@engines.cpu_only
@pytest.mark.parametrize("tp", [2, pytest.param(4, marks=pytest.mark.long)])
def test_whole_experts_on_each_rank(models, tp):
    """Written as loaded by vLLM to the last bit; the same model as cut by tensor, whose sums have another order."""
    for rank in run_ranks(by_experts, tp, models, tp, timeout=900):
        for family, found in rank.items():
            assert found["written"] == found["loaded"] != found["other"], family
            for (tokens, log_probs), (whole_tokens, whole) in zip(found["loaded"], found["whole"], strict=True):
                assert tokens == whole_tokens
                np.testing.assert_allclose(log_probs, whole, atol=1e-4)


def write_beneath_requests(a: Path, b: Path) -> dict[str, Any]:
    engine = engines.build(a)
    engines.write(engine, a)
    expected = engines.greedy(engine)
    parameters = sampling_parameters(Request((5, 6, 7), 0, 4, 0.0), [])
    engines.vllm_engine(engine).add_request("0", {"prompt_token_ids": [5, 6, 7]}, parameters)
    engines.vllm_engine(engine).step()
    found: dict[str, Any] = {"unfinished": engine.unfinished, "refusals": []}
    for write in (engine.wake_weights, engine.open_weights, lambda: engine.load_weights(engines.weights(b))):
        try:
            write()
        except RuntimeError as error:
            found["refusals"].append(str(error))
    while engines.vllm_engine(engine).has_unfinished_requests():
        engines.vllm_engine(engine).step()
    found["finished"] = engine.unfinished
    found["same"] = engines.greedy(engine) == expected
    engine.open_weights()[EMBEDDING].fill_(float("nan"))
    found["padding"] = engine.open_weights()[EMBEDDING][VOCAB:]
    try:
        engines.greedy(engine)
    except AssertionError as error:
        found["open"] = str(error)
    engines.write(engine, b)
    found["other"] = engines.greedy(engine) != expected
    return found


@pytest.mark.ranks
@pytest.mark.vllm
@engines.cpu_only
def test_weights_are_not_written_beneath_requests(models):
    (found,) = run_ranks(write_beneath_requests, 1, models / "qwen2" / "a", models / "qwen2" / "b")
    assert found["unfinished"] == 1
    assert found["refusals"] == ["1 requests are in flight: finish or abort them before weights are synced"] * 3
    assert found["finished"] == 0
    assert found["same"]
    assert found["padding"].shape == (256 - VOCAB, 128)
    assert not found["padding"].any()
    assert found["open"] == "request before load_weights()"
    assert found["other"]


def highest() -> int:
    """Most that was resident, in bytes."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) << 10


def weigh(path: Path) -> dict[str, Any]:
    """Resident bytes through weight syncs, and the most that closing took besides."""
    engine = engines.build(path)
    found: dict[str, Any] = {"weights": 4 * sum(int(np.prod(shape)) for shape in engine.weight_shapes().values())}
    found["asleep"] = engines.resident_bytes()
    engine.wake_weights()
    kept = list(engine.open_weights().values())  # as a careless caller would
    for tensor in kept:
        tensor.fill_(0.5)
    found["open"] = engines.resident_bytes()
    Path("/proc/self/clear_refs").write_text("5")  # the highest from now on
    engine.close_weights()
    found["closed"], found["highest"] = engines.resident_bytes(), highest()
    engine.sleep()
    found["asleep again"] = engines.resident_bytes()
    engines.write(engine, path)
    first, found["own"] = engines.greedy(engine), engines.resident_bytes()
    engine.sleep()
    engine.wake_weights()
    engine.share(EMBEDDING, torch.zeros(engine.weight_shapes()[EMBEDDING]))
    engines.write(engine, path)
    found["same"], found["shared"] = engines.greedy(engine) == first, engines.resident_bytes()
    return found


@pytest.fixture(scope="module")
def weighed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = make_model(tmp_path_factory.mktemp("big") / "qwen2", "qwen2", **BIG)
    return run_ranks(weigh, 1, path)[0]


@pytest.mark.ranks
@pytest.mark.vllm
@engines.cpu_only
def test_sleep_gives_the_weights_memory_back(weighed):
    weights = weighed["weights"]
    assert weights > 200 * MIB
    assert weighed["open"] - weighed["asleep"] > 0.95 * weights
    assert 0.95 * weights < weighed["closed"] - weighed["asleep"] < 1.1 * weights
    assert weighed["asleep again"] - weighed["asleep"] < 0.1 * weights


@pytest.mark.ranks
@pytest.mark.vllm
@engines.cpu_only
def test_packing_takes_the_memory_of_one_layer_more(weighed):
    largest = 4 * BIG["vocab_size"] * BIG["hidden_size"]
    assert 1.5 * largest < 0.25 * weighed["weights"]
    assert weighed["highest"] >= weighed["open"]
    assert weighed["highest"] - weighed["open"] < 1.5 * largest


@pytest.mark.ranks
@pytest.mark.vllm
@engines.cpu_only
def test_a_shared_parameter_is_there_once(weighed):
    assert weighed["same"]
    assert weighed["shared"] - weighed["own"] < 0.2 * 4 * BIG["vocab_size"] * BIG["hidden_size"]


def share_all(path: Path) -> dict[str, Any]:
    """A trainer whose memory is the engine's wherever that is possible, and which trains between two weight syncs."""
    engine = engines.build(path)
    found: dict[str, Any] = {"names": engine.shareable(), "shapes": dict(engine.weight_shapes())}
    engine.wake_weights()
    trainer: dict[str, Tensor] = {}
    for name, own in engine.open_weights().items():
        if name in engine.shareable():
            trainer[name] = torch.zeros_like(own)
            engine.share(name, trainer[name])
    engines.write(engine, path)
    opened = engines.greedy(engine)
    engine.sleep()
    changed = {}
    for name, tensor in trainer.items():
        tensor.mul_(1.25)
        changed[name] = tensor.clone()
    engine.wake_weights()
    parameters = engine.open_weights()
    found["kept"] = all(torch.equal(parameters[name], tensor) for name, tensor in changed.items())
    found["addresses"] = all(parameters[name].data_ptr() == trainer[name].data_ptr() for name in trainer)
    engines.fill(parameters, path, EngineLayout(1), but=trainer)
    engine.close_weights()
    engine.wake_cache()
    trained = engines.greedy(engine)
    engine.shutdown()
    fresh = engines.ready(path)
    found["first"] = engines.greedy(fresh) == opened
    fresh.sleep()
    fresh.wake_weights()
    parameters = fresh.open_weights()
    engines.fill(parameters, path, EngineLayout(1))
    for name, tensor in changed.items():
        parameters[name].copy_(tensor)
    fresh.close_weights()
    fresh.wake_cache()
    found["second"] = engines.greedy(fresh) == trained != opened
    fresh.shutdown()
    return found


def share_families(models: Path) -> dict[str, dict[str, Any]]:
    return {family: share_all(models / family / "a") for family in SHARING}


@pytest.fixture(scope="module")
def shared(models: Path) -> dict[str, dict[str, Any]]:
    return run_ranks(share_families, 1, models)[0]


@pytest.mark.ranks
@pytest.mark.vllm
@engines.cpu_only
@pytest.mark.parametrize("family", SHARING)
def test_shared_parameters_are_the_trainer_s(shared, family):
    found = shared[family]
    assert found["first"]
    assert found["addresses"]
    assert found["kept"]
    assert found["second"]


@pytest.mark.ranks
@pytest.mark.vllm
@engines.cpu_only
@pytest.mark.parametrize("family", SHARING)
def test_what_is_packed_is_not_shared(shared, family):
    """Norms, biases, tables and what latent attention multiplies in parts; a tied head has a packed copy besides."""
    plain = (EMBEDDING, "norm.weight", ".bias", "e_score_correction_bias", "kv_b_proj.weight")
    expected = {name for name in shared[family]["shapes"] if name.endswith(plain)}
    assert shared[family]["names"] == expected
