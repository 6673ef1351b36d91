"""The FSDP2 back end as on a GPU: what is on the device, what is in pinned memory, and the numbers of a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rlhpc.core.rank import RankInfo
from rlhpc.parallel import groups
from rlhpc.parallel.compat import device
from rlhpc.parallel.offload import KINDS
from rlhpc.reshard import executor, verify
from rlhpc.reshard.checksum_plan import plan_checksums
from rlhpc.reshard.executor import Mover
from rlhpc.reshard.sides import plan_weight_sync, sync_sides
from rlhpc.sharding.engine_shards import EngineLayout
from rlhpc.sharding.mesh_sizes import MeshSizes
from tests.backends.fsdp.backend_cases import Case, make_backend
from tests.fake_cuda.part_runs import install_flash_attention
from tests.helpers.distributed import run_ranks
from tests.helpers.fake_cuda import FakeCuda
from tests.helpers.parts import sharded_model_of
from tests.helpers.tiny_models import make_model
from tests.helpers.training import TOKENS, batches_of, negative_log_likelihood, optimizer_section, train

pytestmark = pytest.mark.ranks

EVERYTHING = {"parameters": True, "gradients": True, "optimizer": True}
STEPS = 2
MUON = {"name": "muon", "nesterov": False}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("fake_cuda") / "model", "qwen3")


@pytest.fixture(scope="module")
def found(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_ranks(_look, 1, model, tmp_path_factory.mktemp("saved"), join=False)[0]


def _near(losses: list[tuple[float, float]], others: list[tuple[float, float]]) -> bool:
    """In bfloat16, up to the rounding of another attention kernel."""
    return [loss for loss, _ in losses] == pytest.approx([loss for loss, _ in others], rel=1e-2)


def test_everything_of_the_model_is_on_the_device(found: dict[str, Any]) -> None:
    assert found["on the device"] == {"parameters": True, "gradients": True, "optimizer": True, "log-probs": True}
    assert found["backends"] == ["cpu:gloo,cuda:nccl"]


def test_updates_are_those_of_a_cpu(found: dict[str, Any]) -> None:
    assert found["kernel calls"] > 0
    assert _near(found["losses"], found["cpu"])


def test_nearly_all_memory_is_given_away_and_comes_back(found: dict[str, Any]) -> None:
    assert found["held away"] < 0.1 * found["held"]
    assert found["empty_cache"] > 0


def test_a_resumed_run_is_bit_equal(found: dict[str, Any]) -> None:
    assert found["resumed"] == found["losses"][STEPS:]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_state_in_pinned_memory_trains_as_on_a_cpu(found: dict[str, Any], optimizer: str) -> None:
    """Weights are pinned once, and the device has nothing between two updates."""
    offloaded = found[f"{optimizer} in CPU memory"]
    assert _near(offloaded["losses"], found["cpu" if optimizer == "adamw" else "cpu, muon"][:STEPS])
    assert offloaded["pinned"]
    assert offloaded["same tensors"], "FSDP has replaced what optimizer and weight sync hold"
    assert offloaded["moments"] == {"cpu"}
    assert offloaded["held"] < 1000, "rotary frequencies"
    assert offloaded["exported"], "whole tensors for the engine are on the device"


def test_a_weight_sync_brings_weights_in_pinned_memory_onto_the_device(found: dict[str, Any]) -> None:
    """By copies inside a rank, in messages to others, and in checksums of both."""
    assert found["adamw in CPU memory"]["synced"] == {"copies": True, "messages": True, "checksums": True}


def test_two_ranks_train_as_on_a_cpu(model: Path, found: dict[str, Any]) -> None:
    for losses, devices in run_ranks(_two_ranks, 2, model, join=False):
        assert devices == {"cuda"}
        assert _near(losses, found["cpu"])


def _look(model: Path, saved: Path) -> dict[str, Any]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    found: dict[str, Any] = {"cpu": train(_actor(model), 2 * STEPS), "cpu, muon": train(_actor(model, **MUON), STEPS)}
    groups.leave()
    kernel = install_flash_attention()
    with FakeCuda() as cuda:
        groups.join(RankInfo.from_environ())
        found["backends"] = list(cuda.backends)
        found |= _train(cuda, model, saved)
        found["empty_cache"] = cuda.count("empty_cache")
        for name, options in (("adamw", {}), ("muon", MUON)):
            found[f"{name} in CPU memory"] = _train_in_cpu_memory(cuda, model, options)
    return {**found, "kernel calls": len(kernel.calls)}


def _actor(model: Path, memory: dict[str, Any] | None = None, **optimizer: Any) -> Any:
    return make_backend(model, Case("", memory=memory or {}), optimizer_section(**optimizer), dtype="bfloat16")


def _train(cuda: FakeCuda, model: Path, saved: Path) -> dict[str, Any]:
    actor = _actor(model, {"offload": EVERYTHING})
    losses, found = train(actor, STEPS), {}
    kinds = {kind: _all_held(cuda, actor._device_tensors(kind)) for kind in KINDS if kind != "gradients"}
    (stats,) = actor.log_probs(batches_of(actor)[:1], 1.0)
    held = cuda.bytes_held
    actor.offload()
    found["held"], found["held away"] = held, cuda.bytes_held
    actor.save(saved, asynchronous=True).finish()
    losses += train(actor, STEPS)
    actor.load(saved)
    found["losses"], found["resumed"] = losses, train(actor, STEPS)
    found["on the device"] = kinds | {"gradients": _gradients_held(cuda, actor), "log-probs": stats.log_probs.is_cuda}
    return found


def _all_held(cuda: FakeCuda, tensors: list[torch.Tensor]) -> bool:
    return bool(tensors) and all(map(cuda.holds, tensors))


def _gradients_held(cuda: FakeCuda, actor: Any) -> bool:
    actor._differentiate(batches_of(actor), negative_log_likelihood, TOKENS, 1.0)
    return _all_held(cuda, actor._device_tensors("gradients"))


def _train_in_cpu_memory(cuda: FakeCuda, model: Path, optimizer: dict[str, Any]) -> dict[str, Any]:
    from rlhpc.backends.fsdp.optimizers import state_tensors

    before = cuda.bytes_held
    actor = _actor(model, {"cpu_offload": True}, **optimizer)
    weights = {name: tensor.data_ptr() for name, tensor in sharded_model_of(actor).local_tensors().items()}
    losses = train(actor, STEPS)
    local = sharded_model_of(actor).local_tensors()
    held = cuda.bytes_held - before
    views = [actor.view(shard) for shard in actor.shards()]
    return {
        "losses": losses,
        "pinned": all(tensor.is_pinned() and not tensor.is_cuda for tensor in [*local.values(), *views]),
        "same tensors": weights == {name: tensor.data_ptr() for name, tensor in local.items()},
        "moments": {tensor.device.type for tensor in state_tensors(actor.optimizer)},
        "held": held,
        "synced": _sync(actor),
        "exported": all(tensor.is_cuda and tensor.dtype is torch.bfloat16 for _, tensor in actor.full_tensors()),
    }


def _sync(actor: Any) -> dict[str, bool]:
    dtype, written = torch.bfloat16, {}

    def write(shard: Any) -> torch.Tensor:
        return written.setdefault(shard, torch.empty(shard.box.shape, dtype=dtype, device="cuda"))

    sides = sync_sides(actor.shape, MeshSizes(), EngineLayout(1))
    plan = plan_weight_sync(sides, ranks_per_node=1, bucket_bytes=1 << 20, itemsize=dtype.itemsize, rank=0)
    Mover(plan, dtype, device()).move(actor.view, write)
    found = {"copies": bool(written)}
    for copy in plan.local(0):
        found["copies"] &= written[copy.target].is_cuda
        found["copies"] &= torch.equal(written[copy.target].cpu(), actor.view(copy.source).to(dtype))
    shard = actor.shards()[0]
    message = torch.empty(shard.box.volume * dtype.itemsize, dtype=torch.uint8, device="cuda")
    executor.put(message, actor.view(shard), dtype)
    arrived = executor.get(message, shard.box.shape, dtype)
    found["messages"] = arrived.is_cuda and torch.equal(arrived.cpu(), actor.view(shard).to(dtype))
    sums = plan_checksums(sides.source, sides.target, 0)
    expected = verify.expected_sums(sums, actor.view, lambda tensor: executor.wire_dtype(tensor, dtype), device())
    found["checksums"] = expected.is_cuda and bool((expected != 0).all())
    return found


def _two_ranks(model: Path) -> tuple[list[tuple[float, float]], set[str]]:
    install_flash_attention()
    with FakeCuda(devices=2):
        groups.join(RankInfo.from_environ())
        actor = _actor(model)
        losses = train(actor, 2 * STEPS)
        return losses, {tensor.device.type for tensor in sharded_model_of(actor).local_tensors().values()}
