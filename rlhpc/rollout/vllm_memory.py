"""GPU memory shared by vLLM and the trainer: an engine's claim, replaced weights, allocator options."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlhpc.config.rollout import RolloutSection
from rlhpc.core.errors import UserError, one_line
from rlhpc.core.rank import RankInfo
from rlhpc.parallel.compat import unmap_vllm_allocation
from rlhpc.parallel.offload import release_cached
from rlhpc.plan.estimates.memory import EngineMemory, engine_bytes
from rlhpc.rollout.vllm_arguments import ServedModel

_GIB = 1 << 30
_OFFLOAD = "offload more of the trainer (actor.memory.offload)"
_unmapped: list[Tensor] = []  # weights without memory, whose addresses stay reserved until the process ends
_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # the keys of a snapshot, newest first


@dataclass(frozen=True)
class Refusal:
    """A rank that vLLM refuses: its node, free and total bytes of its GPU, and vLLM's reason."""

    node: str
    free: int
    total: int
    reason: str


class EngineRefused(Exception):
    """vLLM refuses these ranks. Raised on every rank of the job."""

    def __init__(self, ranks: Mapping[int, Refusal]) -> None:
        super().__init__(f"vLLM refuses ranks {sorted(ranks)}")
        self.ranks = ranks


def claimed_share(section: RolloutSection, memory: EngineMemory, total: int) -> float:
    """Share of the GPU that vLLM requires to be free at startup (v1/worker/utils.py, request_memory).

    ``rollout.gpu_memory_utilization``, or with ``rollout.kv_cache_gib`` the engine's need: vLLM then uses the share for
    nothing else.
    """
    return section.gpu_memory_utilization if section.kv_cache_gib is None else min(1.0, memory.claimed / total)


def agree(error: ValueError | None, free: int, total: int) -> None:
    """Raises EngineRefused on every rank if vLLM refused one with ``error``. Collective over the job's ranks."""
    mine = None if error is None else Refusal(RankInfo.from_environ().node, free, total, one_line(str(error)))
    everyone: list[Refusal | None] = [mine]
    if dist.is_initialized():
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
    if refused := {rank: found for rank, found in enumerate(everyone) if found is not None}:
        raise EngineRefused(refused) from error


def device_memory() -> tuple[int, int | None]:
    """(free, total) bytes of this rank's GPU, PyTorch's cache among the free ones; (0, None) without a GPU."""
    if not torch.cuda.is_available():
        return 0, None
    release_cached()
    return torch.cuda.mem_get_info()


def check_free(model: ServedModel, section: RolloutSection, free: int, total: int) -> None:
    """Raises the same UserError on every rank if an engine claims more than the ``free`` bytes of any rank. Collective
    over the job's ranks."""
    memory = engine_bytes(section, model.shape, model.dtype, total)
    short = free < math.ceil(claimed_share(section, memory, total) * total)
    try:
        agree(ValueError("too little free memory") if short else None, free, total)
    except EngineRefused as refused:
        raise explain(refused, section, memory, model.max_model_len, _OFFLOAD) from None


def explain(
    refused: EngineRefused, section: RolloutSection, memory: EngineMemory, sequence: int, instead: str
) -> UserError:
    """Error that names the rank with the least memory and the value that would fit, or what to do ``instead``.
    ``sequence``: tokens of the longest sequence, which the KV cache must hold."""
    rank, found = min(refused.ranks.items(), key=lambda item: item[1].free)
    share = claimed_share(section, memory, found.total)
    claim = math.ceil(share * found.total)
    if found.free >= claim:
        return UserError(f"vLLM refuses rank {rank} on {found.node}: {found.reason}", where="rollout")
    name, fits, enough = memory.fitting_setting(section, claim, found.free, found.total, sequence)
    key, has = f"rollout.{name}", f"rank {rank} on {found.node} has {_gib(found.free)} of {_gib(found.total)} GiB free"
    if section.kv_cache_gib is None:
        message = f"at {share:g} the engine needs {_gib(claim)} GiB; {has}"
    else:
        parts = {"weights": memory.weights, "forward passes": memory.working, "KV cache": memory.cache}
        what = ", ".join(f"{part} {_gib(size)}" for part, size in parts.items())
        message = f"the engine needs {_gib(claim)} GiB ({what}); {has}"
    if enough:
        return UserError(message, where=key, remedy=f"set it to {fits:g}, or {instead}")
    needs = f"at least {_gib(memory.smallest(sequence))} GiB with one sequence of full length"
    return UserError(f"{message}, and the engine needs {needs}", where=key, remedy=f"{instead}, or raise rollout.tp")


def free_weights(replaced: Sequence[Tensor], used: Sequence[Tensor]) -> None:
    """Frees the memory of vLLM's ``replaced`` weights, except what is still ``used``. vLLM must be awake.

    Memory is unmapped if nothing else shares its allocation (``compat.unmap_vllm_allocation``). The tensors are
    retained, so that PyTorch neither reuses their addresses nor unmaps them again: PyTorch's statistics still count
    them, the GPU's do not.
    """
    from vllm.device_allocator import get_mem_allocator_instance

    torch.cuda.synchronize()
    addresses = {_address(tensor) for tensor in replaced} - {_address(tensor) for tensor in used}
    for address, blocks in unused_segments(_segments(get_mem_allocator_instance()), addresses).items():
        if unmap_vllm_allocation(address):
            _unmapped.extend(tensor for tensor in replaced if _address(tensor) in blocks)


def unused_segments(segments: Iterable[Mapping[str, Any]], replaced: set[int]) -> dict[int, set[int]]:
    """Segments of a memory snapshot whose used blocks are all ``replaced``: the blocks' addresses by the segment's."""
    found = {}
    for segment in segments:
        used = {block["address"] for block in segment["blocks"] if block["state"] != "inactive"}
        if used and used <= replaced:
            found[segment["address"]] = used
    return found


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _segments(allocator: Any) -> Iterator[Mapping[str, Any]]:
    pools = allocator.allocator_and_pools["weights"]
    for pool, _ in pools if isinstance(pools, list) else [pools]:  # vLLM 0.25 has one pool per tag
        yield from pool.snapshot()


@contextlib.contextmanager
def allocator_settings_restored() -> Iterator[None]:
    """Disables expandable segments in PyTorch's allocator options during vLLM's startup; restores the options after.

    vLLM's pools do not work with expandable segments (cumem.py:321). 0.25 disables them only if they are set in
    PYTORCH_CUDA_ALLOC_CONF, and sets max_split_size_mb (gpu_worker.py:255); each time PyTorch resets the other options,
    garbage_collection_threshold and roundup_power2_divisions, for the rest of the process.
    """
    if not torch.cuda.is_available():
        yield
        return
    before = _allocator_settings()
    _set_allocator_settings(re.sub(r"(expandable_segments\s*:\s*)True", r"\1False", before))
    try:
        yield
    finally:
        _set_allocator_settings(before)


def _set_allocator_settings(settings: str) -> None:
    if _allocator_settings() != settings:
        torch._C._accelerator_setAllocatorSettings(settings)


def _allocator_settings() -> str:
    """The current options, as last set."""
    get = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
    if get is not None:
        return str(get())
    settings = torch.cuda.memory._snapshot()["allocator_settings"]  # before torch 2.13
    return str(next(settings[name] for name in _SETTINGS if name in settings))


def _gib(size: int) -> str:
    return f"{size / _GIB:.1f}"
