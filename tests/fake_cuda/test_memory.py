"""Memory of a GPU and what waits for it: offload, the optimizer's share in CPU memory, weight sync, timing."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rlhpc.backends.megatron import adamw as adamw_module
from rlhpc.backends.megatron.adamw import AdamW
from rlhpc.core import env
from rlhpc.core.rank import RankInfo
from rlhpc.observe.metrics import _now
from rlhpc.parallel.compat import device, megatron_device
from rlhpc.parallel.groups import join, leave
from rlhpc.parallel.offload import KINDS, Offloader, release_cached
from rlhpc.reshard.executor import Mover
from rlhpc.reshard.sides import plan_weight_sync, sync_sides
from rlhpc.sharding.engine_shards import EngineLayout
from rlhpc.sharding.layout import ParallelLayout
from rlhpc.sharding.shards import Shard
from tests.helpers.blocks import Parameters, shape_of_kind
from tests.helpers.fake_cuda import FakeCuda

pytestmark = pytest.mark.heavy


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process group of this process alone, left in any case."""
    for name in (env.MASTER_ADDR, env.MASTER_PORT):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv(name, "0")  # restored by pytest, whoever sets it
        monkeypatch.delenv(name)
    monkeypatch.delenv(env.RLHPC_STORE, raising=False)
    yield
    leave()


def test_ranks_of_a_gpu_join_over_nccl_each_with_a_device_of_its_own(joined: None) -> None:
    with FakeCuda(devices=2) as cuda:
        join(RankInfo(rank=0, world_size=1, local_rank=1, node="a", master_addr="127.0.0.1", master_port=0))
        assert cuda.backends == ["cpu:gloo,cuda:nccl"]
        assert cuda.calls == [("set_device", 1)]
        assert device() == torch.device("cuda", 1)
        with megatron_device():
            assert torch.zeros(1, device="cuda").is_cuda
        total = torch.ones(2, device="cuda")
        dist.all_reduce(total)
        assert total.tolist() == [1.0, 1.0]
    assert device() == torch.device("cpu")


def test_cached_memory_is_released_with_that_of_reference_cycles() -> None:
    with FakeCuda() as cuda:
        cycle: list[Any] = [torch.empty(1 << 20, device="cuda")]
        cycle.append(cycle)
        gc.disable()
        try:
            del cycle
            assert cuda.bytes_held == 4 << 20
            release_cached()
        finally:
            gc.enable()
        assert cuda.bytes_held == 0
        assert cuda.count("empty_cache") == 1


def test_a_phase_is_timed_when_the_device_is_done() -> None:
    with FakeCuda() as cuda:
        before = _now()
        assert _now() >= before
        assert cuda.count("synchronize") == 2


@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_what_is_offloaded_leaves_the_device_and_comes_back(fraction: float) -> None:
    with FakeCuda() as cuda:
        content = {kind: torch.arange(float(1 << 16), device="cuda") + i for i, kind in enumerate(KINDS)}
        views = {kind: tensor[100:] for kind, tensor in content.items()}
        expected = {kind: tensor.cpu() for kind, tensor in content.items()}
        offload = Offloader(KINDS, fraction, lambda kind: [content[kind]])
        total = cuda.bytes_held
        offload.release(*KINDS)
        offloaded = total - cuda.bytes_held
        assert offloaded >= fraction * total
        assert cuda.bytes_pinned >= offloaded - content["gradients"].numel() * 4  # gradients need no copy
        # The copies are asynchronous: memory must not be released before they are done.
        names = [call[0] for call in cuda.calls]
        assert "stream.synchronize" in names
        assert names.index("stream.synchronize") < names.index("empty_cache")
        offload.restore(*KINDS)
        assert cuda.bytes_held == total
        for kind in KINDS:
            away = kind == "gradients"
            assert torch.equal(content[kind].cpu(), torch.zeros_like(expected[kind]) if away else expected[kind])
            assert torch.equal(views[kind].cpu(), content[kind].cpu()[100:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_optimizer_s_share_in_cpu_memory_is_pinned_and_changes_no_bit(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(adamw_module, "_STAGED", 96, raising=False)  # several pieces, the last one shorter
    expected = _updated("cpu", dtype, 0.0)
    with FakeCuda() as cuda:
        assert _equal(_updated("cuda", dtype, 0.0), expected)
        assert cuda.bytes_pinned == 0
        found = _updated("cuda", dtype, 0.6, check=_check_places)
        assert _equal(found, expected)
        assert cuda.count("event.record") > 0
        assert cuda.count("event.synchronize") > 0


def _updated(on: str, dtype: torch.dtype, share: float, check: Any = None) -> list[Tensor]:
    """Parameters after three updates, on the CPU."""
    generator = torch.Generator().manual_seed(4)
    params = [torch.randn(size, generator=generator).to(dtype).to(on).requires_grad_() for size in (200, 150, 250)]
    optimizer = AdamW([{"params": params, "weight_decay": 0.1}], lr=1e-2)
    optimizer.optimizer_offload_fraction = share
    optimizer.begin()
    for _ in range(3):
        for param in params:
            gradient = torch.randn(param.shape, generator=generator).to(on)
            setattr(param, "grad" if dtype == torch.float32 else "decoupled_grad", gradient)
        optimizer.step()
    if check is not None:
        check(optimizer, params)
    return [param.detach().cpu() for param in params]


def _check_places(optimizer: AdamW, params: list[Tensor]) -> None:
    """Whole parameters in their order: the first two hold 0.58 of all, so that all three are the CPU's."""
    for param in params:
        assert param.is_cuda
        states = [value for value in optimizer.state[param].values() if torch.is_tensor(value)]
        assert len(states) == (2 if param.dtype == torch.float32 else 3)
        assert all(value.is_pinned() and not value.is_cuda for value in states)


def _equal(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_the_engine_s_views_are_made_once_on_a_gpu(joined: None) -> None:
    """Its memory stays where it is there; on a CPU it comes and goes."""
    views = {}
    for on in ("cpu", "cuda"):
        with FakeCuda() as cuda:
            join(RankInfo(rank=0, world_size=1, local_rank=0, node="a", master_addr="127.0.0.1", master_port=0))
            shape = shape_of_kind("qwen2")
            sides = sync_sides(shape, ParallelLayout(1), EngineLayout(1))
            plan = plan_weight_sync(sides, ranks_per_node=1, bucket_bytes=1 << 16, itemsize=4, rank=0)
            source, target = Parameters(sides.source[0], True), Parameters(sides.target[0], False)
            if on == "cuda":
                for side in (source, target):
                    side.tensors = {name: tensor.cuda() for name, tensor in side.tensors.items()}
            asked: list[Shard] = []

            def write(shard: Shard, asked: list[Shard] = asked, target: Parameters = target) -> Tensor:
                asked.append(shard)
                return target.view(shard)

            mover = Mover(plan, torch.float32, torch.device(on))
            mover.move(source.view, write)
            once = len(asked)
            mover.move(source.view, write)
            views[on] = len(asked) / once
            for side in (source, target):
                side.tensors = {name: tensor.cpu() for name, tensor in side.tensors.items()}
            assert not target.wrong()
            del cuda
        leave()
    assert views == {"cpu": 2.0, "cuda": 1.0}
