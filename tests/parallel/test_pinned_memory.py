"""Pinned memory: exactly the bytes asked for, registered as long as a tensor uses them, and what a fork sees of it."""

from __future__ import annotations

import gc
import mmap
import os

import pytest
import torch

from rlhpc.core.errors import UserError
from rlhpc.parallel import pinned_memory
from rlhpc.reshard.staged.layout import StagingMemory

GPU = torch.device("cuda")  # named only: nothing here runs on one
CPU = torch.device("cpu")


class Cudart:
    """Stands in for CUDA's runtime: which ranges are registered now, and how many calls there were."""

    def __init__(self, result: int = 0) -> None:
        self.registered: dict[int, int] = {}
        self.calls = 0
        self._result = result

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.calls += 1
        if self._result == 0:
            assert flags == 0
            assert address % mmap.PAGESIZE == 0
            assert address not in self.registered
            self.registered[address] = size
        return self._result

    def cudaHostUnregister(self, address: int) -> int:
        self.calls += 1
        del self.registered[address]
        return 0


@pytest.fixture
def cudart(monkeypatch: pytest.MonkeyPatch) -> Cudart:
    return _stand_in(monkeypatch)


def _stand_in(monkeypatch: pytest.MonkeyPatch, result: int = 0) -> Cudart:
    cudart = Cudart(result)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    return cudart


@pytest.mark.parametrize("size", [1, mmap.PAGESIZE, (5 << 20) + 3])
def test_exactly_what_is_asked_for_is_registered_until_the_last_view_is_gone(cudart: Cudart, size: int) -> None:
    tensor = pinned_memory.allocate(size, GPU)
    assert cudart.registered == {tensor.data_ptr(): size}
    assert tensor.untyped_storage().nbytes() == size
    assert not tensor.any()
    view = tensor[size // 2 :]
    del tensor
    assert len(cudart.registered) == 1
    view.fill_(7)
    del view
    assert cudart.registered == {}
    assert cudart.calls == 2


def test_nothing_is_registered_without_a_gpu_or_for_no_bytes(cudart: Cudart) -> None:
    assert len(pinned_memory.allocate(100, CPU)) == 100
    assert len(pinned_memory.allocate(0, GPU)) == 0
    assert cudart.calls == 0


def test_memory_that_cannot_be_pinned_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    cudart = _stand_in(monkeypatch, result=2)
    with pytest.raises(UserError) as caught:
        pinned_memory.allocate(3 << 20, GPU)
    assert str(caught.value).startswith(
        "actor.memory.offload: CUDA cannot pin 0.00 GiB of CPU memory (error 2); offload less"
    )
    gc.collect()
    assert cudart.calls == 1, "what was not registered is not unregistered"
    with pytest.raises(UserError) as caught:
        StagingMemory(3 << 20, torch.bfloat16, GPU)
    assert str(caught.value).startswith("slurm.memory: CUDA cannot pin"), "engines have nothing to offload"


def test_a_forked_process_does_not_unregister(cudart: Cudart) -> None:
    held = [pinned_memory.allocate(100, GPU)]
    child = os.fork()
    if child == 0:
        held.clear()
        os._exit(cudart.calls)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 1, "the parent's registration alone"
    assert len(cudart.registered) == 1


def test_a_fork_sees_later_writes_but_not_in_private_copies() -> None:
    tensors = {
        "allocated": pinned_memory.allocate(8, CPU),
        "a view": pinned_memory.allocate(16, CPU)[8:],
        "shared": torch.zeros(8, dtype=torch.uint8).share_memory_(),
        "ordinary": torch.zeros(8, dtype=torch.uint8),
    }
    copies = {name: pinned_memory.private(tensor) for name, tensor in tensors.items()}
    go_on, written = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(go_on, 1)
        seen = [int(tensor[0]) for tensor in (*tensors.values(), *copies.values())]
        os._exit(int("".join(map(str, seen)), 2))
    for tensor in tensors.values():
        tensor.fill_(1)
    os.write(written, b"x")
    _, status = os.waitpid(child, 0)
    for end in (go_on, written):
        os.close(end)
    assert os.waitstatus_to_exitcode(status) == 0b1110_0000
    assert copies["ordinary"] is tensors["ordinary"], "copied for nothing"
