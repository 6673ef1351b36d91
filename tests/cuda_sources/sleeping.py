"""What sleep and waking do in a release: its own worker, back end, allocator and executor, without a device.

Memory is a set of tagged allocations. vLLM's code maps and unmaps them; here that only changes the set.
"""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

_PLACES = ("v1/worker", "compilation", "device_allocator")
_SIZE = 1 << 20


def pool_tags(folder: Path) -> list[str]:
    """Tags under which a GPU worker allocates memory that can sleep, from the sources."""
    tags: set[str] = set()
    for place in _PLACES:
        for file in (folder / "vllm" / place).rglob("*.py"):
            if "xpu" in file.name:
                continue
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call) and "memory_pool" in ast.unparse(node.func):
                    given = [*node.args[:1], *(k.value for k in node.keywords if k.arg == "tag")]
                    tags.update(a.value for a in given if isinstance(a, ast.Constant) and isinstance(a.value, str))
    return sorted(tags)


def worker_facts(folder: Path, config: Any) -> dict[str, Any]:
    """Of a sleep of level 2 and the two steps of waking, as ``VllmEngine`` asks for them."""
    from vllm.v1.worker.gpu_worker import Worker

    from rlhpc.rollout.vllm_gpu import EngineGpuWorker

    tags = pool_tags(folder)
    memory = _Memory(tags)
    worker = _worker(Worker, config)
    model = worker.model_runner.model
    facts: dict[str, Any] = {"tags": tags}
    with memory.in_force(), _without_device():
        worker.sleep(level=2)
        facts["asleep"] = memory.unmapped()
        facts["contents kept"] = memory.kept()
        with torch.no_grad():
            model.table.fill_(-1)  # its memory is another's now
        worker.wake_up(tags=["weights"])
        facts["asleep with weights awake"] = memory.unmapped()
        facts["buffers restored"] = model.table.tolist() == [1.0, 2.0, 3.0]
        worker.wake_up(tags=["kv_cache"])
        facts["asleep when awake"] = memory.unmapped()
        worker.sleep(level=2)
        facts["asleep again"] = memory.unmapped()
    facts["errors"] = memory.errors
    facts["memory taken meanwhile"] = [_sleeps(cls, config, tags) for cls in (Worker, EngineGpuWorker)]
    return facts


def _sleeps(cls: Any, config: Any, tags: list[str]) -> bool:
    """Whether a worker accepts that after its sleep less memory is free than before."""
    free = [(left * _SIZE, 20 * _SIZE) for left in range(9, 0, -1)]
    with _Memory(tags).in_force(), _without_device(), contextlib.ExitStack() as stack:
        for owner, name in ((torch.accelerator, "get_memory_info"), (torch.cuda, "mem_get_info")):
            stack.enter_context(mock.patch.object(owner, name, side_effect=free, create=True))
        try:
            _worker(cls, config).sleep(level=2)
        except AssertionError:
            return False
    return True


def executor_facts() -> dict[str, Any]:
    """The calls that reach the workers."""
    from vllm.v1.executor.abstract import Executor

    calls: list[Any] = []
    recording = type(
        "Recording",
        (Executor,),
        {"__init__": lambda self: None, "collective_rpc": lambda self, name, **call: calls.append([name, call])},
    )
    recording.__abstractmethods__ = frozenset()  # type: ignore[attr-defined]
    executor: Any = recording()
    executor.sleeping_tags = set()
    with contextlib.suppress(AttributeError):  # a property in later releases
        executor.is_sleeping = False
    executor.sleep(level=2)
    executor.wake_up(tags=["weights"])
    executor.wake_up(tags=["kv_cache"])
    return {"calls": [[name, call.get("kwargs")] for name, call in calls], "asleep": bool(executor.is_sleeping)}


class _Memory:
    """An allocation for each tag."""

    def __init__(self, tags: list[str]) -> None:
        from vllm.device_allocator import cumem

        self._cumem = cumem
        self._tags = {(1 + i) * _SIZE: tag for i, tag in enumerate(tags)}
        self._mapped = set(self._tags)
        self.errors: list[str] = []
        self._allocator = object.__new__(cumem.CuMemAllocator)
        self._allocator.current_tag = "default"
        self._allocator.pointer_to_data = {
            address: cumem.AllocationData((0, _SIZE, address, 0), tag) for address, tag in self._tags.items()
        }

    def unmapped(self) -> list[str]:
        return sorted(tag for address, tag in self._tags.items() if address not in self._mapped)

    def kept(self) -> list[str]:
        """Tags whose contents are in CPU memory."""
        held = self._allocator.pointer_to_data.values()
        return sorted(data.tag for data in held if data.cpu_backup_tensor is not None)

    @contextlib.contextmanager
    def in_force(self) -> Iterator[None]:
        cumem = self._cumem
        nothing = SimpleNamespace(cudaMemcpy=lambda *_: None, cudaMemset=lambda *_: None)
        replaced = {
            "cumem_available": True,
            "unmap_and_release": self._unmap,
            "create_and_map": self._map,
            "libcudart": nothing,
            "PIN_MEMORY": False,
            "is_pin_memory_available": lambda: False,
        }
        with contextlib.ExitStack() as stack:
            for name, value in replaced.items():
                if hasattr(cumem, name):
                    stack.enter_context(mock.patch.object(cumem, name, value))
            stack.enter_context(mock.patch.object(cumem.CuMemAllocator, "instance", self._allocator))
            yield

    def _unmap(self, handle: tuple[int, int, int, Any]) -> None:
        address = handle[2]
        if address not in self._mapped:
            self.errors.append(f"{self._tags[address]} is unmapped twice")
        self._mapped.discard(address)

    def _map(self, handle: tuple[int, int, int, Any]) -> None:
        address = handle[2]
        if address in self._mapped:
            self.errors.append(f"{self._tags[address]} is mapped twice")
        self._mapped.add(address)


def _worker(cls: Any, config: Any) -> Any:
    """A worker with a model of one buffer, not started."""
    model = torch.nn.Module()
    model.register_buffer("table", torch.tensor([1.0, 2.0, 3.0]))
    worker = object.__new__(cls)
    worker.vllm_config, worker.model_config, worker.cache_config = config, config.model_config, config.cache_config
    worker.model_runner = SimpleNamespace(
        model=model,
        get_model=lambda: model,
        get_draft_model=lambda: None,
        post_kv_cache_wake_up=lambda: None,
        init_fp8_kv_scales=lambda: None,
        drafter=None,
        speculator=None,
    )
    worker.device, worker.use_v2_model_runner, worker.local_rank, worker.rank = torch.device("cpu"), True, 0, 0
    worker._sleep_saved_buffers = {}
    worker._sleep_saved_parameters = {}
    worker._sleep_saved_draft_buffers = {}
    worker._sleep_mode_backend = None
    worker.weight_transfer_engine = None
    return worker


@contextlib.contextmanager
def _without_device() -> Iterator[None]:
    """As much memory is free after a sleep as vLLM expects."""
    nothing, amounts = (lambda *_, **__: None), (lambda *_, **__: (10 * _SIZE, 20 * _SIZE))
    places = [
        (torch.cuda, {"mem_get_info": amounts, "synchronize": nothing, "empty_cache": nothing}),
        (torch.accelerator, {"get_memory_info": amounts, "synchronize": nothing, "empty_cache": nothing}),
    ]
    with contextlib.ExitStack() as stack:
        for owner, functions in places:
            for name, function in functions.items():
                stack.enter_context(mock.patch.object(owner, name, function, create=True))
        yield
