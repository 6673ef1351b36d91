"""The engine as on a GPU: vLLM's CPU build behind the code for GPUs, its weights used as they were loaded."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from rlhpc.api import Request, SamplingOptions
from rlhpc.config.schema import RolloutSection
from rlhpc.core import env
from rlhpc.core.errors import NodeError, UserError
from rlhpc.core.rank import RankInfo
from rlhpc.models import read_model
from rlhpc.parallel.groups import _select_gpu
from rlhpc.rollout import vllm_arguments, vllm_details, vllm_engine
from rlhpc.rollout.vllm_weights import _DERIVED, LiveWeights
from rlhpc.sharding.engine_shards import EngineLayout
from tests.helpers.distributed import run_ranks
from tests.helpers.fake_cuda import GIB, FakeCuda
from tests.helpers.tiny_models import make_model
from tests.rollout import engines

KINDS = ("qwen2", "qwen3moe", "dsv3")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for kind in KINDS:
        for seed, letter in enumerate("ab"):
            changes = {"vocab_size": engines.VOCAB, **engines.CHANGES.get(kind, {})}
            make_model(folder / kind / letter, kind, seed, max_position_embeddings=engines.CONTEXT, **changes)
    return folder


@pytest.fixture(scope="module")
def found(models: Path) -> dict[str, Any]:
    return run_ranks(_look, 1, models, join=False)[0]


@pytest.mark.ranks
@pytest.mark.vllm
def test_weights_are_written_where_the_kernels_read_them(found: dict[str, Any]) -> None:
    """Loaded, written in place, and again with others: the answers of the CPU's engine, at the same addresses."""
    one = found["written"]
    for how in ("loaded", "written"):
        assert [tokens for tokens, _ in one[how]] == [tokens for tokens, _ in one["cpu"]], how
        for (_, ours), (_, theirs) in zip(one[how], one["cpu"], strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-4)
    assert one["other"] != one["written"]
    assert one["same addresses"]


@pytest.mark.ranks
@pytest.mark.vllm
def test_a_shared_parameter_is_the_trainer_s_and_its_own_memory_is_given_back(found: dict[str, Any]) -> None:
    shared = found["shared"]
    assert shared["with graphs"] == frozenset()
    assert shared["all"]
    assert shared["same answers"]
    assert shared["live"]
    assert shared["freed"] == shared["own"]
    assert shared["used"]


@pytest.mark.ranks
@pytest.mark.vllm
def test_a_seed_of_each_token_reaches_the_v1_runner(found: dict[str, Any]) -> None:
    """A sampled response resumed after an abort continues its random numbers."""
    assert found["resumed"] == found["whole"]
    assert found["routed experts of in-flight requests"] is None


@pytest.mark.ranks
@pytest.mark.vllm
def test_an_engine_without_room_beside_the_trainer_is_refused_before_it_wakes(found: dict[str, Any]) -> None:
    ((trainer, message),) = found["refused"].items()
    assert trainer == "79.9"
    assert message.startswith("rollout.kv_cache_gib: the engine needs 0.1 GiB (weights 0.0, ")
    assert " has 0.1 of 80.0 GiB free; " in message
    assert "offload more of the trainer" in message


@pytest.mark.ranks
@pytest.mark.vllm
def test_the_engine_s_start_keeps_the_device_s_random_numbers(found: dict[str, Any]) -> None:
    assert found["device rng"]


@pytest.mark.ranks
@pytest.mark.vllm
def test_derived_weights_of_latent_attention_keep_their_addresses(found: dict[str, Any]) -> None:
    latent = found["latent"]
    assert latent["names"] == ["kv_b_proj.weight"]
    assert latent["shareable"] == []
    assert latent["as vLLM left them"]
    assert latent["copies"]
    assert latent["copies that vLLM replaces"]


@pytest.mark.ranks
@pytest.mark.vllm
def test_routed_experts_are_those_of_the_layers_that_have_some(found: dict[str, Any]) -> None:
    """vLLM counts all layers; uint8 stays what it is, wider types become int16."""
    assert found["routed_experts"] == {
        "uint8": ("uint8", [[[3, 4]], [[9, 10]]]),
        "int32": ("int16", [[[3, 4]], [[9, 10]]]),
    }


@pytest.mark.ranks
@pytest.mark.vllm
def test_vllm_is_asked_for_what_a_gpu_needs(found: dict[str, Any]) -> None:
    """Memory that sleeps, the GPU worker, graphs, weights that stay as they are loaded, and routed experts."""
    expected = {
        "enable_sleep_mode": True,
        "worker_cls": vllm_arguments.GPU_WORKER,
        "enforce_eager": False,
        "gpu_memory_utilization": 0.4,
        "moe_backend": "triton",
        "enable_return_routed_experts": True,
    }
    asked = found["asked of vLLM"]
    assert {name: asked.get(name) for name in expected} == expected
    assert "kv_cache_memory_bytes" not in asked


@pytest.mark.ranks
@pytest.mark.vllm
def test_an_engine_of_one_rank_takes_the_gpu_of_its_local_rank(tmp_path: Path) -> None:
    """Beside trainers on its node. By itself vLLM takes the first GPU."""
    path = make_model(tmp_path / "model", "qwen2")
    assert run_ranks(_launchers, 1, path, join=False) == [[None, "external_launcher"]]


def _launchers(path: Path) -> list[str | None]:
    """For the first and the second local rank of a node."""
    found = []
    section = {"kv_cache_gib": None, "gpu_memory_utilization": 0.4}
    for local_rank in ("0", "1"):
        os.environ[env.LOCAL_RANK] = local_rank
        build = mock.patch.object(vllm_engine, "_build", side_effect=_Started)
        with FakeCuda(), build as called, pytest.raises(_Started):
            engines.build(path, **section)
        found.append(called.call_args.args[0].get("distributed_executor_backend"))
    return found


def _look(models: Path) -> dict[str, Any]:
    from tests.fake_cuda.gpu_worker import as_on_a_gpu

    path, other = models / "qwen2" / "a", models / "qwen2" / "b"
    plain = engines.ready(path)
    one: dict[str, Any] = {"cpu": engines.greedy(plain)}
    plain.shutdown()
    found: dict[str, Any] = {"written": one, "shared": {}, "asked of vLLM": _asked(models / "qwen3moe" / "a")}
    with FakeCuda() as cuda, as_on_a_gpu():
        state = torch.cuda.get_rng_state()
        engine = engines.build(path, cuda_graphs=False)
        found["refused"] = _refuse(cuda, engine)
        found["device rng"] = bool(torch.equal(torch.cuda.get_rng_state(), state))
        engines.sync(engine, path)
        one["loaded"] = engines.greedy(engine)
        addresses = {name: tensor.data_ptr() for name, tensor in engine.open_weights().items()}
        engine.close_weights()
        engine.sleep()
        engines.write(engine, other)
        one["other"] = engines.greedy(engine)
        engine.sleep()
        engines.write(engine, path)
        one["written"] = engines.greedy(engine)
        one["same addresses"] = addresses == {n: t.data_ptr() for n, t in engine.open_weights().items()}
        engine.close_weights()
        found |= _resume(engine)
        found["shared"] |= _share(engine, path)
        found["routed_experts"] = _routed_experts()
        engine.shutdown()
    latent = engines.ready(models / "dsv3" / "a")
    found["latent"] = _latent(latent)
    return found


def _refuse(cuda: FakeCuda, engine: Any) -> dict[str, str]:
    """What a sleeping engine is refused with, beside a trainer of so many GiB on the GPU."""
    found = {}
    for gib in (0.0, 79.0, 79.9):
        cuda.mapped["trainer"] = int(gib * GIB)
        try:
            engine.check_memory()
        except UserError as error:
            found[str(gib)] = str(error)
    del cuda.mapped["trainer"]
    return found


class _Started(Exception):
    """vLLM would start now."""


def _asked(path: Path) -> dict[str, Any]:
    """The arguments that vLLM would get for a model with experts."""
    section = {"routed_experts": True, "kv_cache_gib": None, "gpu_memory_utilization": 0.4}
    with FakeCuda(), mock.patch.object(vllm_engine, "_build", side_effect=_Started) as build:
        with pytest.raises(_Started):
            engines.build(path, **section)
        return build.call_args.args[0]


def _resume(engine: Any) -> dict[str, Any]:
    request = Request(engines.PROMPTS[0], seed=2**40 + 1, max_tokens=30, temperature=1.0)
    (whole,) = engine.generate([request])
    engine.submit(0, request)
    for _ in range(10):
        engine.step()
    begun = engine.abort([0])[0]
    tokens = begun.tokens.tolist()
    rest = Request((*request.prompt, *tokens), seed=request.seed, max_tokens=30 - len(tokens), temperature=1.0)
    (resumed,) = engine.generate([rest])
    return {
        "whole": whole.tokens.tolist(),
        "resumed": tokens + resumed.tokens.tolist(),
        "routed experts of in-flight requests": begun.routed_experts,
    }


def _share(engine: Any, path: Path) -> dict[str, Any]:
    before = engines.greedy(engine)
    engine.sleep()
    engine.wake_weights()
    trainer = {name: torch.zeros_like(own) for name, own in engine.open_weights().items()}
    found: dict[str, Any] = {"all": engine.shareable() == trainer.keys()}
    engines.fill(trainer, path, EngineLayout(1))
    own = engine.open_weights()
    for name, tensor in trainer.items():
        engine.share(name, tensor)
    with mock.patch("rlhpc.rollout.vllm_weights.free_weights") as free:  # vLLM's CPU build has no allocator for it
        engine.open_weights()
        engine.close_weights()
    ((replaced, used), _) = free.call_args
    found["own"] = sorted(tensor.data_ptr() for tensor in own.values())
    found["freed"] = sorted(tensor.data_ptr() for tensor in replaced)
    found["used"] = {tensor.data_ptr() for tensor in trainer.values()} <= {tensor.data_ptr() for tensor in used}
    engine.wake_cache()
    found["same answers"] = engines.greedy(engine) == before
    trainer["model.norm.weight"].mul_(2)
    found["live"] = engines.greedy(engine) != before
    vllm = engines.vllm_engine(engine)
    (captured,) = vllm.apply_model(lambda model: LiveWeights(model, torch.float32, captured=True).shareable())
    return found | {"with graphs": captured}


def _routed_experts() -> dict[str, Any]:
    """Of a request of two tokens in a model of three layers, the second with experts."""
    from vllm.outputs import CompletionOutput

    found = {}
    for dtype in (np.uint8, np.int32):
        routed = np.arange(1, 13, dtype=dtype).reshape(2, 3, 2)
        output = CompletionOutput(0, "", [5], None, None, routed_experts=routed)
        routed_experts = vllm_details._routed_on_gpu(SimpleNamespace(outputs=[output]), [1])
        found[np.dtype(dtype).name] = (routed_experts.dtype.name, routed_experts.tolist())
    return found


def _latent(engine: Any) -> dict[str, Any]:
    """LiveWeights over one of vLLM's own latent attention layers."""

    def look(model: torch.nn.Module) -> dict[str, Any]:
        from vllm.model_executor.layers.attention.mla_attention import MLAAttention

        layer = next(module for module in model.modules() if isinstance(module, MLAAttention))
        weights = LiveWeights(layer, torch.float32, captured=False)
        found: dict[str, Any] = {"names": sorted(weights.shapes), "shareable": sorted(weights.shareable())}
        derive = layer.process_weights_after_loading

        def derive_anew(dtype: torch.dtype) -> None:
            """As vLLM 0.25, which assigns new tensors and does not write into those there are."""
            for derived in _DERIVED:
                delattr(layer, derived)
            derive(dtype)

        for name in ("as vLLM left them", "copies", "copies that vLLM replaces"):
            if name.startswith("copies"):
                for derived in _DERIVED:
                    copy = torch.nn.Parameter(getattr(layer, derived).detach().clone(), requires_grad=False)
                    setattr(layer, derived, copy)
            if name.endswith("replaces"):
                layer.process_weights_after_loading = derive_anew
            addresses = [getattr(layer, derived).data_ptr() for derived in _DERIVED]
            weights.open()["kv_b_proj.weight"].normal_()
            weights.close()
            now = [getattr(layer, derived) for derived in _DERIVED]
            found[name] = [tensor.data_ptr() for tensor in now] == addresses and all(
                torch.equal(tensor, wanted) for tensor, wanted in zip(now, _derived(layer), strict=True)
            )
        return found

    return engines.vllm_engine(engine).apply_model(look)[0]


def _derived(layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """What latent attention multiplies by: the values' half of kv_b_proj, and the keys' half turned."""
    heads = layer.kv_b_proj.weight.view(layer.num_heads, -1, layer.kv_lora_rank)
    keys, values = heads.split([layer.qk_nope_head_dim, layer.v_head_dim], dim=1)
    return values.transpose(1, 2), keys


@pytest.mark.parametrize(("top_k", "temperature", "kept"), [(5, 1.0, [2]), (None, 1.0, None), (5, 0.0, None)])
def test_kept_tokens_are_those_of_a_request_s_own_sampling(top_k: int | None, temperature: float, kept: Any) -> None:
    """vLLM returns a mask of every request once it returns some."""
    engine = SimpleNamespace(model_config=SimpleNamespace(return_sampling_mask=True))
    details = vllm_details.ResponseDetails(engine, expert_layers=(), kept=True, on_gpu=True)
    details.begin(7, Request((1,), 0, 1, temperature, options=SamplingOptions(top_k=top_k)))
    response = SimpleNamespace(sampling_mask=[[3, 4]], token_ids=[3], stop_reason=None)
    found = details.of_finished(SimpleNamespace(outputs=[response], prompt_token_ids=[1], request_id="7"))
    assert (found["kept"].counts.tolist() if "kept" in found else None) == kept


def test_what_is_asked_of_vllm_for_routed_experts_follows_its_features(monkeypatch: pytest.MonkeyPatch) -> None:
    """A vLLM that mixes up steps in flight gets them one at a time; one without routed experts is refused, and so is tp
    2."""
    both = {"enable_return_routed_experts": None, "aux_output_config": None}
    for known, expected in (
        (both, {"enable_return_routed_experts": True}),
        (dict(list(both.items())[:1]), {"enable_return_routed_experts": True, "async_scheduling": False}),
    ):
        with _vllm_with(known):
            assert vllm_arguments.route_arguments(RolloutSection(tp=1)) == expected
            with pytest.raises(UserError, match="first rank"):
                vllm_arguments.route_arguments(RolloutSection(tp=2))
    with _vllm_with({}), pytest.raises(UserError, match="does not return routed experts"):
        vllm_arguments.route_arguments(RolloutSection(tp=1))


def _vllm_with(fields: dict[str, Any]) -> Any:
    return mock.patch.dict("sys.modules", vllm=SimpleNamespace(EngineArgs=SimpleNamespace(__dataclass_fields__=fields)))


@pytest.mark.ranks
@pytest.mark.parametrize("nodes", [1, 2])
def test_an_engine_spans_nodes_shares_no_gpu_memory_through_sockets(tmp_path: Path, nodes: int) -> None:
    make_model(tmp_path / "model", "qwen2")
    expected = {1: None, 2: "0"}[nodes]
    assert run_ranks(_start, 2, tmp_path / "model", nodes) == [expected] * 2


def _start(path: Path, nodes: int) -> str | None:
    """The variable as it is when vLLM would start."""
    os.environ.pop(env.VLLM_ALLREDUCE_USE_SYMM_MEM, None)
    place = property(lambda self: f"node {dist.get_rank() % nodes}")
    with FakeCuda(), mock.patch.object(RankInfo, "place", place):
        with mock.patch.object(vllm_engine, "_build", side_effect=_Started), pytest.raises(_Started):
            engines.build(path, tp=2, shape=read_model(path))
        return os.environ.get(env.VLLM_ALLREDUCE_USE_SYMM_MEM)


def rank(local_rank: int) -> RankInfo:
    return RankInfo(local_rank, 8, local_rank, "node1", "localhost", 1)


def test_a_rank_for_which_there_is_no_gpu_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(env.RLHPC_GPU_SECONDS, "120")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with FakeCuda(devices=7) as cuda:
        assert _select_gpu(rank(6))
        assert cuda.calls == [("set_device", 6)]
        with pytest.raises(NodeError, match=r"^rank 7 \(local rank 7\) on node node1: PyTorch finds 7 usable GPUs; "):
            _select_gpu(rank(7))
    with pytest.raises(NodeError, match="PyTorch finds 0 usable GPUs"):
        _select_gpu(rank(0))
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(UserError, match="this PyTorch is built without CUDA; install a build with CUDA") as caught:
        _select_gpu(rank(0))
    assert not isinstance(caught.value, NodeError), "another node would do no better"


def test_ranks_of_other_launchers_may_share_a_gpu_or_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(env.RLHPC_GPU_SECONDS, raising=False)
    assert not _select_gpu(rank(0))
    with FakeCuda(devices=2) as cuda:
        assert _select_gpu(rank(3))
        assert cuda.calls == [("set_device", 1)]
