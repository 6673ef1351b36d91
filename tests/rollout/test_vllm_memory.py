"""GPU memory between vLLM and the trainer, on vLLM's own code with stand-ins for the driver and for torch.cuda.

tests/gpu measures the same on a GPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from rlhpc.config.schema import RolloutSection
from rlhpc.core.errors import UserError
from rlhpc.models import read_model
from rlhpc.plan.estimates.memory import EngineMemory, engine_bytes
from rlhpc.rollout import vllm_engine, vllm_memory
from rlhpc.rollout.process_state import process_state_restored
from rlhpc.rollout.vllm_arguments import ServedModel
from rlhpc.rollout.vllm_weights import LiveWeights
from tests.helpers.distributed import run_ranks

GIB = 1 << 30
MODEL = Path(__file__).parents[2] / "configs" / "ready" / "models" / "Qwen2.5-7B"
TOTAL = 80 * GIB
SEQUENCE = 4096


def memory_of(section: RolloutSection, total: int = TOTAL) -> EngineMemory:
    return engine_bytes(section, read_model(MODEL), "bfloat16", total)


# --- a rank that vLLM refuses


def refuse(section: RolloutSection, free: tuple[int, ...]) -> str:
    """What this rank's engine is refused with, by vLLM's own check of so many free bytes on each rank."""
    from vllm.v1.worker import gpu_worker

    from rlhpc.rollout.vllm_gpu import EngineGpuWorker

    mine = free[dist.get_rank()]

    def build(arguments: dict[str, Any]) -> None:
        """As far as vLLM gets without a GPU."""
        gpu_worker.Worker.init_device = lambda self: request(arguments["gpu_memory_utilization"], mine)
        EngineGpuWorker.__new__(EngineGpuWorker).init_device()

    torch.cuda.mem_get_info = lambda *device: (mine, TOTAL)
    vllm_engine._build = build
    model = ServedModel(MODEL, read_model(MODEL), "bfloat16", SEQUENCE)
    try:
        vllm_engine._start({}, model, section, TOTAL)
    except UserError as error:
        return str(error)
    return ""


def request(share: float, free: int) -> int:
    """vLLM's check."""
    from vllm.utils.mem_utils import MemorySnapshot
    from vllm.v1.worker.utils import request_memory

    snapshot = MemorySnapshot(free_memory=free, total_memory=TOTAL, device="cpu", auto_measure=False)
    return request_memory(snapshot, SimpleNamespace(gpu_memory_utilization=share))


def refuse_all() -> dict[str, str]:
    share, cache = RolloutSection(gpu_memory_utilization=0.6), RolloutSection(kv_cache_gib=8.0)
    return {
        "enough": refuse(share, (50 * GIB, 49 * GIB)),
        "share": refuse(share, (60 * GIB, 31 * GIB)),
        "cache": refuse(cache, (60 * GIB, 20 * GIB)),
        "cache enough": refuse(cache, (60 * GIB, 28 * GIB)),
        "nothing": refuse(cache, (9 * GIB, 10 * GIB)),
        "asleep": refuse_awake(share, (60 * GIB, 31 * GIB)),
        "asleep, enough": refuse_awake(share, (48 * GIB, 49 * GIB)),
    }


def refuse_awake(section: RolloutSection, free: tuple[int, ...]) -> str:
    """What this rank's sleeping engine is refused with, beside the trainer."""
    model = ServedModel(MODEL, read_model(MODEL), "bfloat16", SEQUENCE)
    try:
        vllm_memory.check_free(model, section, free[dist.get_rank()], TOTAL)
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.ranks
@pytest.mark.vllm
def test_all_ranks_end_with_one_line_and_the_value_that_fits() -> None:
    first, second = run_ranks(refuse_all, 2)
    assert first == second
    assert first["enough"] == first["cache enough"] == ""
    assert first["share"].startswith("rollout.gpu_memory_utilization: at 0.6 the engine needs 48.0 GiB; rank 1 on ")
    assert first["share"].endswith(" has 31.0 of 80.0 GiB free; set it to 0.38, or end other processes on the GPU")
    assert first["asleep"] == first["share"].replace(
        "end other processes on the GPU", "offload more of the trainer (actor.memory.offload)"
    )
    assert first["asleep, enough"] == ""
    assert request(0.38, 31 * GIB)
    assert first["cache"].startswith("rollout.kv_cache_gib: the engine needs ")
    fits = RolloutSection(kv_cache_gib=float(first["cache"].partition("set it to ")[2].partition(",")[0]))
    assert 0 < fits.kv_cache_gib < 8
    assert request(vllm_memory.claimed_share(fits, memory_of(fits), TOTAL), 20 * GIB)
    assert "rank 0 on " in first["nothing"], "the one with least"
    assert first["nothing"].endswith("; end other processes on the GPU, or raise rollout.tp")


def test_with_a_cache_of_given_size_an_engine_claims_what_it_needs_and_no_more() -> None:
    section = RolloutSection(kv_cache_gib=4.0, gpu_memory_utilization=0.6)
    memory = memory_of(section)
    needs = memory.weights + memory.working + memory.cache
    assert 14 * GIB + memory.cache < needs < 0.6 * TOTAL
    assert vllm_memory.claimed_share(section, memory, TOTAL) == needs / TOTAL
    assert vllm_memory.claimed_share(section, memory, 10 * GIB) == 1.0
    assert vllm_memory.claimed_share(RolloutSection(gpu_memory_utilization=0.6), memory, TOTAL) == 0.6


def test_what_is_no_lack_of_memory_keeps_vllm_s_words() -> None:
    found = vllm_memory.Refusal("n7", 70 * GIB, TOTAL, "bfloat16 is not supported")
    section = RolloutSection()
    error = vllm_memory.explain(vllm_memory.EngineRefused({3: found}), section, memory_of(section), SEQUENCE, "wait")
    assert isinstance(error, UserError)
    assert str(error) == "rollout: vLLM refuses rank 3 on n7: bfloat16 is not supported"


# --- weights that others have replaced


class Driver:
    """Stands in for CUDA's virtual memory: which addresses are mapped. A second unmapping fails, as the real one."""

    def __init__(self) -> None:
        self.mapped: dict[int, int] = {}

    def map(self, device: int, size: int, address: int, handle: int) -> None:
        assert address not in self.mapped, "mapped twice"
        self.mapped[address] = size

    def unmap(self, device: int, size: int, address: int, handle: int) -> None:
        del self.mapped[address]

    @property
    def bytes(self) -> int:
        return sum(self.mapped.values())


class Pool:
    """Stands in for PyTorch's pool of the weights: segments with the storages in them, as ``snapshot`` describes."""

    def __init__(self, *segments: list[torch.Tensor]) -> None:
        self.segments = [[tensor.untyped_storage() for tensor in segment] for segment in segments]

    def snapshot(self) -> list[dict[str, Any]]:
        return [
            {
                "address": segment[0].data_ptr(),
                "blocks": [
                    *({"address": storage.data_ptr(), "state": "active_allocated"} for storage in segment),
                    {"address": segment[-1].data_ptr() + segment[-1].nbytes(), "state": "inactive"},
                ],
            }
            for segment in self.segments
        ]


@contextlib.contextmanager
def allocator_of(pool: Pool, as_list: bool) -> Iterator[tuple[Any, Driver]]:
    """vLLM's own allocator, awake, with the pool's segments for weights and one more for the KV cache."""
    from vllm import device_allocator
    from vllm.device_allocator import AllocationData, cumem

    driver, allocator = Driver(), cumem.CuMemAllocator()
    stand_ins = [
        (cumem, "python_create_and_map", driver.map),
        (cumem, "python_unmap_and_release", driver.unmap),
        (device_allocator, "get_mem_allocator_instance", lambda: allocator),
        (torch.cuda, "synchronize", lambda *device: None),
        (torch.cuda, "empty_cache", lambda: None),
    ]
    originals = [(module, name, getattr(module, name)) for module, name, _ in stand_ins]
    for module, name, stand_in in stand_ins:
        setattr(module, name, stand_in)
    try:
        segments = {
            segment[0].data_ptr(): ("weights", sum(storage.nbytes() for storage in segment))
            for segment in pool.segments
        }
        for address, (tag, size) in {**segments, 1: ("kv_cache", 1000)}.items():
            allocator.pointer_to_data[address] = AllocationData((0, size, address, 0), tag)
            driver.map(0, size, address, 0)
        allocator.allocator_and_pools["weights"] = [(pool, None)] if as_list else (pool, None)
        yield allocator, driver
    finally:
        for module, name, original in originals:
            setattr(module, name, original)


def share_weights(as_list: bool) -> None:
    model = nn.ModuleDict({name: nn.Linear(size, 10, bias=False) for name, size in (("a", 10), ("b", 30), ("c", 50))})
    model["d"] = nn.Linear(70, 10, bias=False)
    model["e"], model["f"] = nn.Linear(20, 10, bias=False), nn.Linear(20, 10, bias=False)
    both = torch.zeros(2, 10, 20)
    model["e"].weight.data, model["f"].weight.data = both
    own = {name: parameter.data for name, parameter in model.named_parameters()}
    sizes = {name: tensor.nbytes for name, tensor in own.items()}
    pool = Pool([own["a.weight"], own["b.weight"]], [own["c.weight"]], [own["d.weight"]], [both])
    with allocator_of(pool, as_list) as (allocator, driver):
        weights = LiveWeights(model, torch.float32, captured=False)
        all_bytes = driver.bytes
        trainer = {name: torch.randn_like(own[name]) for name in ("a.weight", "c.weight", "d.weight", "e.weight")}
        for name in ("a.weight", "c.weight", "e.weight"):
            weights.share(name, trainer[name])
        assert weights.open()["a.weight"].data_ptr() == trainer["a.weight"].data_ptr()
        assert driver.bytes == all_bytes - sizes["c.weight"], "b is in the segment of a, f in the storage of e"
        weights.share("d.weight", trainer["d.weight"])
        weights.close()
        freed = sizes["c.weight"] + sizes["d.weight"]
        held = {tensor.data_ptr() for tensor in vllm_memory._unmapped}
        assert held == {own["c.weight"].data_ptr(), own["d.weight"].data_ptr()}, "PyTorch would unmap it again"
        assert driver.bytes == all_bytes - freed
        for _ in range(2):
            allocator.sleep(offload_tags=())
            assert driver.bytes == 0
            allocator.wake_up(["weights"])
            assert driver.bytes == all_bytes - 1000 - freed, "mapped again"
            allocator.wake_up(["kv_cache"])
            for name, tensor in trainer.items():
                weights.share(name, tensor)
            weights.open()
            weights.close()
            assert driver.bytes == all_bytes - freed


@pytest.mark.ranks
@pytest.mark.vllm
@pytest.mark.parametrize("as_list", [True, False], ids=["0.32", "0.25"])
def test_memory_of_shared_weights_is_freed_and_stays_so(as_list: bool) -> None:
    run_ranks(share_weights, 1, as_list, join=False)


def test_only_segments_whose_used_blocks_are_all_replaced_are_freed() -> None:
    def segment(address: int, *blocks: str) -> dict[str, Any]:
        found = [{"address": address + i, "state": state} for i, state in enumerate(blocks)]
        return {"address": address, "blocks": found}

    segments = [
        segment(100, "active_allocated", "inactive"),
        segment(200, "active_allocated", "active_allocated"),
        segment(300, "inactive"),
        segment(400, "active_allocated", "active_pending_free"),
    ]
    assert vllm_memory.unused_segments(segments, {100, 200, 300, 400}) == {100: {100}}
    assert vllm_memory.unused_segments(segments, {201, 200, 101}) == {200: {200, 201}}


# --- PyTorch's allocator options


class Options:
    """Stands in for torch's options: a new string leaves expandable_segments as they were if it does not name them,
    and resets the others (c10/core/AllocatorConfig.cpp, parseArgs)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, text: str, getter: bool) -> None:
        self.values: dict[str, str] = {}
        self._snapshot: dict[str, str] = {}
        self.set(text)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.random, "fork_rng", lambda devices: contextlib.nullcontext())
        monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", self.set, raising=False)
        if getter:
            monkeypatch.setattr(torch._C, "_accelerator_getAllocatorSettings", lambda: self.text, raising=False)
        else:
            monkeypatch.delattr(torch._C, "_accelerator_getAllocatorSettings", raising=False)
            monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: {"allocator_settings": self._snapshot})

    def set(self, text: str) -> None:
        kept = {name: value for name, value in self.values.items() if name == "expandable_segments"}
        self.values = {**kept, **dict(field.split(":") for field in text.split(",") if field)}
        self.text = self._snapshot["PYTORCH_CUDA_ALLOC_CONF"] = text


ALL = "expandable_segments:True,garbage_collection_threshold:0.8,max_split_size_mb:512"


@pytest.mark.parametrize("getter", [True, False], ids=["torch 2.13", "torch 2.11"])
@pytest.mark.parametrize("text", ["", "garbage_collection_threshold:0.8", ALL])
def test_allocator_options_survive_vllm_s_start(monkeypatch: pytest.MonkeyPatch, text: str, getter: bool) -> None:
    """As vLLM 0.25 sets them, where the options are in PYTORCH_ALLOC_CONF."""
    options = Options(monkeypatch, text, getter)
    before = dict(options.values)
    with process_state_restored():
        assert options.values.get("expandable_segments") != "True"
        options.set("max_split_size_mb:20")
        options.set("max_split_size_mb:17592186044415")
        assert options.values.get("expandable_segments") != "True"
    assert options.values == before
    assert options.text == text


def test_allocator_options_survive_a_start_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    options = Options(monkeypatch, ALL, getter=True)
    with pytest.raises(KeyError), vllm_memory.allocator_settings_restored():
        raise KeyError
    assert options.text == ALL
