"""Memory on one GPU: levers free it without changing a number, and a weight sync takes what PyTorch does not use."""

from __future__ import annotations

import gc
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhpc.backends.megatron.optimizer import inner_optimizers
from rlhpc.config.training import MemorySection
from rlhpc.core.rank import RankInfo
from rlhpc.parallel import pinned_memory
from rlhpc.parallel.groups import join
from rlhpc.sharding.engine_shards import EngineLayout
from tests.gpu.memory_levers import (
    EVERYTHING,
    LAYERS,
    WIDE,
    check_activations,
    check_offload,
    numbers_and_memory,
    offload_meanwhile,
)
from tests.helpers import weight_syncs
from tests.helpers.distributed import run_ranks
from tests.helpers.equality import Case
from tests.helpers.parts import chunks_of, writer_of
from tests.helpers.tiny_models import make_model
from tests.helpers.training import digest, make_actor, optimizer_section, train
from tests.helpers.weight_syncs import Pair
from tests.rollout import engines

pytestmark = [pytest.mark.gpu, pytest.mark.ranks]


def test_levers_on_a_gpu(tmp_path: Path) -> None:
    """One process for all: offload and a save in the background change no bit, the host's share little."""
    model = make_model(tmp_path / "model", "qwen3", **WIDE)
    (found,) = run_ranks(_look, 1, model, tmp_path / "saved", join=False)
    check_offload(found)
    assert found["optimizer"] == {("cpu", True)}
    assert [loss for loss, _ in found["host"]] == pytest.approx([loss for loss, _ in found["plain"]], rel=1e-3)


def _look(model: Path, saved: Path) -> dict[str, Any]:
    join(RankInfo.from_environ())
    found: dict[str, Any] = {}
    actor = make_actor(model, optimizer_section(optimizer_offload_fraction=1.0), dtype="bfloat16")
    found["host"] = train(actor, 4)
    (inner,) = inner_optimizers(actor.optimizer)
    own = [value for state in inner.state.values() for value in state.values()]
    assert {name for state in inner.state.values() for name in state} == {"exp_avg", "exp_avg_sq", "master_param"}
    found["optimizer"] = {(value.device.type, value.is_pinned()) for value in own}
    actor = make_actor(model, optimizer_section(), dtype="bfloat16")
    found["plain"] = train(actor, 4)
    del actor, inner, own

    memory = MemorySection(offload=EVERYTHING)
    actor = make_actor(model, optimizer_section(), memory, "bfloat16")
    return found | offload_meanwhile(actor, saved)


def test_activations_in_cpu_memory_free_the_gpu_and_change_no_number(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "qwen3", **WIDE, num_hidden_layers=LAYERS)
    (found,) = run_ranks(_activations, 1, model, join=False)
    check_activations(*found)


def _activations(model: Path) -> list[dict[str, Any]]:
    """Without and with offload."""
    join(RankInfo.from_environ())
    found = []
    for offload in (False, True):
        memory, before = MemorySection(recompute="full", offload_activations=offload), torch.cuda.memory_allocated()
        actor = make_actor(model, optimizer_section(), memory, "bfloat16")
        found.append(numbers_and_memory(actor, before))
        found[-1]["most"] = actor._activations.most if offload else 0
        for chunk in chunks_of(actor):
            vars(chunk).clear()  # hooks in autograd's nodes refer to the wrapper, invisible to gc
        del actor, chunk
        gc.collect()
    return found


@pytest.mark.parametrize("fraction", [0.0, 1.0])
def test_none_of_later_updates_is_in_a_checkpoint_written_meanwhile(tmp_path: Path, fraction: float) -> None:
    """The writer is stopped while state in pinned memory changes and freed pinned memory is used again."""
    model = make_model(tmp_path / "model", "qwen3", **WIDE)
    (found,) = run_ranks(_save_meanwhile, 1, model, tmp_path / "saved", fraction, join=False)
    assert found["resumed"] == found["straight"]


def _save_meanwhile(model: Path, saved: Path, fraction: float) -> dict[str, Any]:
    join(RankInfo.from_environ())
    actor = make_actor(model, optimizer_section(optimizer_offload_fraction=fraction), dtype="bfloat16")
    train(actor, 1)
    sizes = [tensor.nbytes for _, tensor in actor.full_tensors()]
    saved.mkdir()
    share = actor.save(saved, asynchronous=True)
    writer = writer_of(share)
    os.kill(writer, signal.SIGSTOP)
    straight = [*train(actor, 2), digest(actor)]
    garbage = [
        torch.full((factor * size,), 255, dtype=torch.uint8, pin_memory=True) for size in sizes for factor in (1, 2)
    ]
    os.kill(writer, signal.SIGCONT)
    share.finish()
    del garbage
    actor = make_actor(model, optimizer_section(optimizer_offload_fraction=fraction), dtype="bfloat16")
    actor.load(saved)
    return {"straight": straight, "resumed": [*train(actor, 2), digest(actor)]}


def test_pinned_memory_is_as_large_as_what_is_in_it(tmp_path: Path) -> None:
    """Of a size just above a power of two, which PyTorch's own pinned memory would double.

    The driver's own memory for copies comes with the first of them.
    """
    (found,) = run_ranks(_pin, 1, join=False)
    assert found["pinned"]
    assert found["equal"]
    assert found["size"] <= found["taken"] < 1.01 * found["size"]
    assert found["left"] < 0.01 * found["size"]


def _pin() -> dict[str, Any]:
    _pin_bytes((1 << 24) + 1)
    return _pin_bytes((1 << 30) + 12345)


def _pin_bytes(size: int) -> dict[str, Any]:
    device = torch.device("cuda", 0)
    content = torch.randint(0, 256, (size,), dtype=torch.uint8, device=device)
    before = _shared_bytes()
    tensor = pinned_memory.allocate(size, device)
    found: dict[str, Any] = {"size": size, "taken": _shared_bytes() - before, "pinned": tensor.is_pinned()}
    tensor.copy_(content, non_blocking=True)
    torch.cuda.synchronize()
    found["equal"] = bool((tensor.to(device) == content).all())
    del tensor
    gc.collect()
    found["left"] = _shared_bytes() - before
    return found


def _shared_bytes() -> int:
    """Resident memory of this process that forked processes share."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssShmem"))
    return 1024 * int(line.split()[1])


def test_shared_weights_take_their_memory_once(tmp_path: Path) -> None:
    sizes = {"hidden_size": 2048, "head_dim": 128, "intermediate_size": 8192, "vocab_size": 32768}
    model = make_model(tmp_path / "model", "qwen2", **sizes)
    (found,) = run_ranks(_share, 1, model, join=False)
    assert found["freed"] > 0.9 * found["weights"], "biases and norms are in allocations with others"
    assert found["mapped again"] < 0.1 * found["weights"]
    assert found["same"]


def _share(model: Path) -> dict[str, Any]:
    def free() -> int:
        torch.cuda.synchronize()
        return torch.cuda.mem_get_info()[0]

    engine = engines.ready(model, cuda_graphs=False, kv_cache_gib=0.25)
    loaded = engines.greedy(engine)
    engine.sleep()
    engine.wake_weights()
    trainer = {name: torch.zeros_like(own) for name, own in engine.open_weights().items()}
    engines.fill(trainer, model, EngineLayout(1))
    found: dict[str, Any] = {"weights": sum(tensor.nbytes for tensor in trainer.values())}
    before = free()
    for name, tensor in trainer.items():
        engine.share(name, tensor)
    engine.open_weights()
    engine.close_weights()
    found["freed"] = free() - before
    for _ in range(2):
        engine.sleep()
        asleep = free()
        engine.wake_weights()
        found["mapped again"] = asleep - free()
        engine.open_weights()
        engine.close_weights()
        engine.wake_cache()
        found["same"] = engines.greedy(engine) == loaded
    return found


HEADS = {"hidden_size": 256, "head_dim": 64, "intermediate_size": 512, "vocab_size": 256}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), "qwen3", **HEADS)


def sync_beside_cached_memory(model: Path, method: str) -> bool:
    """A second weight sync while PyTorch holds all memory but half of the engine's cache, half of that in garbage;
    whether the engine answers as after the first."""
    from rlhpc.core.rank import RankInfo
    from rlhpc.parallel.groups import join
    from tests.helpers.training import make_actor

    join(RankInfo.from_environ())
    engine = engines.build(model, cuda_graphs=False, kv_cache_gib=2.0)
    actor = make_actor(model, dtype="bfloat16")
    manager = weight_syncs.make_manager(actor, engine, Pair(Case("qwen3"), 1), method=method)
    with manager:
        first = engines.greedy(engine)
    size = (torch.cuda.mem_get_info()[0] - (1 << 30)) // 2
    cached, garbage = (torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(2))
    cycle: list[Any] = [garbage]
    cycle.append(cycle)
    del cached, garbage, cycle
    with manager:
        return engines.greedy(engine) == first


@pytest.mark.parametrize("method", ["direct", "gather"])
def test_a_weight_sync_takes_memory_that_pytorch_does_not_use(model: Path, method: str) -> None:
    assert run_ranks(sync_beside_cached_memory, 1, model, method, join=False) == [True]
