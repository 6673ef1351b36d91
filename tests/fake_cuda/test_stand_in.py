"""The stand-in for CUDA itself: where tensors are, what mixing them does, and what it leaves behind."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from bench.device_time import kernels
from tests.helpers.fake_cuda import FakeCuda
from tests.helpers.fake_cuda_profiler import RANGE

CUDA = torch.device("cuda", 0)


def test_what_is_computed_from_the_device_s_tensors_is_on_the_device() -> None:
    with FakeCuda() as cuda:
        weight = torch.nn.Parameter(torch.ones(4, 4, device="cuda"))
        x = torch.arange(8.0).view(2, 4).to(CUDA)
        loss = F.linear(x, weight).float().sum()
        loss.backward()
        for tensor in (weight, x, x.view(-1)[2:], torch.zeros_like(x), x.new_empty(3), loss, weight.grad, x.to(0)):
            assert tensor.is_cuda
            assert tensor.device == CUDA
            assert not tensor.is_cpu
        assert weight.grad is not None
        assert weight.untyped_storage().device.type == "cuda"
        assert cuda.holds(weight.grad)
        assert not torch.ones(2).is_cuda
        assert weight.grad.cpu()[0].tolist() == [4.0, 6.0, 8.0, 10.0]


def test_tensors_of_two_devices_are_not_mixed() -> None:
    with FakeCuda():
        x = torch.ones(3, device="cuda")
        with pytest.raises(RuntimeError, match="same device"):
            x + torch.ones(3)
        with pytest.raises(RuntimeError, match="same device"):
            F.embedding(torch.tensor([0]), torch.ones(2, 2, device="cuda"))
        with pytest.raises(TypeError, match="cpu"):
            x.numpy()
        assert (x + torch.tensor(1.0)).is_cuda  # a number
        assert x[torch.tensor([0, 2])].is_cuda  # indices may be on the CPU


def test_copies_between_devices_share_no_memory() -> None:
    with FakeCuda():
        host = torch.zeros(3)
        device = host.to("cuda")
        device.fill_(1)
        assert host.tolist() == [0.0] * 3
        back = device.cpu()
        device.fill_(2)
        assert back.tolist() == [1.0] * 3
        assert not back.is_cuda
        host.copy_(device, non_blocking=True)
        assert host.tolist() == [2.0] * 3
        assert not host.is_cuda
        assert not torch.empty_like(device, device=torch.device("cpu")).is_cuda


def test_gradients_go_back_to_where_the_tensor_came_from() -> None:
    with FakeCuda():
        host = torch.ones(3, requires_grad=True)
        weight = torch.full((3,), 2.0, device="cuda", requires_grad=True)
        (host.cuda() * weight).cpu().mul(torch.ones(3)).sum().backward()
        assert host.grad is not None
        assert weight.grad is not None
        assert not host.grad.is_cuda
        assert weight.grad.is_cuda
        assert host.grad.tolist() == [2.0] * 3


def test_memory_is_held_until_it_is_freed() -> None:
    with FakeCuda(total_gib=1.0) as cuda:
        first, second = torch.empty(1 << 20, device="cuda"), torch.empty(1 << 18, device="cuda")
        assert cuda.bytes_held == torch.cuda.memory_allocated() == (4 << 20) + (1 << 20)
        assert torch.cuda.mem_get_info() == ((1 << 30) - (5 << 20), 1 << 30)
        del second
        assert cuda.bytes_held == 4 << 20
        first.untyped_storage().resize_(0)
        assert cuda.bytes_held == 0


def test_memory_s_peak_is_kept_until_it_is_reset() -> None:
    with FakeCuda(total_gib=1.0, context_gib=0.25) as cuda:
        kept = torch.empty(1 << 18, device="cuda")
        torch.empty(1 << 20, device="cuda")
        assert torch.cuda.memory_allocated() == 1 << 20
        assert torch.cuda.max_memory_allocated() == 5 << 20
        torch.cuda.reset_peak_memory_stats()
        assert torch.cuda.max_memory_allocated() == kept.nbytes
        cuda.mapped["engine"] = 1 << 20
        assert torch.cuda.mem_get_info()[0] == (768 << 20) - kept.nbytes - (1 << 20)


def test_a_generator_is_of_one_device() -> None:
    with FakeCuda():
        host, device = torch.Generator(), torch.Generator("cuda").manual_seed(3)
        assert device.device == CUDA
        drawn = torch.empty(4, device="cuda").normal_(generator=device)
        assert drawn.tolist() == torch.empty(4).normal_(generator=host.manual_seed(3)).tolist()
        for tensor, generator in ((drawn, host), (torch.empty(4), device)):
            with pytest.raises(RuntimeError, match="device type for generator"):
                tensor.normal_(generator=generator)


def test_a_device_in_force_is_that_of_new_tensors() -> None:
    with FakeCuda():
        with torch.device("cuda"):
            assert torch.nn.Linear(2, 2).weight.is_cuda
            assert torch.randint(0, 9, (2,)).is_cuda
        assert not torch.ones(2).is_cuda


def test_kernels_are_profiled_without_the_ranges_around_them() -> None:
    """As on a GPU a range's time is that of the kernels in it, and is not counted again."""
    with FakeCuda():
        x = torch.randn(64, 64, device="cuda")
        names = {kernel.name for kernel in kernels(lambda: x @ x, on_gpu=True)}
    assert "aten::mm_kernel" in names
    assert not {"aten::mm", RANGE} & names


def test_pinned_memory_is_the_host_s() -> None:
    with FakeCuda() as cuda:
        pinned = torch.empty(8, pin_memory=True)
        assert pinned.is_pinned()
        assert not pinned.is_cuda
        assert cuda.bytes_pinned == 32
        with pytest.raises(RuntimeError, match="cannot pin"):
            pinned.cuda().pin_memory()


def test_nothing_is_left_of_it() -> None:
    names = ("is_available", "current_device", "synchronize", "Stream", "get_rng_state")
    before = [getattr(torch.cuda, name) for name in names]
    kept: list[torch.Tensor] = []
    with pytest.raises(KeyError):
        _fail_within(kept)
    assert [getattr(torch.cuda, name) for name in names] == before
    assert "device" not in vars(torch.UntypedStorage)
    assert not kept[0].is_cuda
    assert (kept[0] + torch.ones(2)).tolist() == [2.0, 2.0]


def _fail_within(made: list[torch.Tensor]) -> None:
    with FakeCuda():
        made.append(torch.ones(2, device="cuda"))
        raise KeyError


def test_a_device_that_does_not_exist_is_refused() -> None:
    with FakeCuda(devices=2) as cuda:
        torch.cuda.set_device(1)
        assert torch.cuda.current_device() == 1
        with pytest.raises(RuntimeError, match="invalid device ordinal"):
            torch.cuda.set_device(2)
        assert cuda.calls == [("set_device", 1), ("set_device", 2)]
