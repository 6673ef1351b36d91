"""vLLM's CPU worker with what its CPU build lacks, through its extension points: a worker class and a model loader.

Imported by vLLM only, by the name in ``vllm_arguments.CPU_WORKER``.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from vllm import ir
from vllm.config import get_current_vllm_config
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.platforms import current_platform
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend
from vllm.v1.worker.cpu_worker import CPUWorker

from rlhpc.core import env
from rlhpc.core.errors import UserError
from rlhpc.core.known_warnings import without_native_lines
from rlhpc.core.rank import RankInfo
from rlhpc.rollout.cpu_experts import restrict_to_local_experts
from rlhpc.rollout.cpu_noise import CpuNoise, cpu_noise
from rlhpc.rollout.cpu_routed_experts import RouteRecorder
from rlhpc.rollout.cpu_weights import PackedWeights
from rlhpc.rollout.draft_weights import mark_own_tables
from rlhpc.rollout.kept_tokens import RecordsKeptTokens
from rlhpc.rollout.speculation import Speculates
from rlhpc.rollout.token_seeds import seed_tokens

_LOAD_FORMAT = "rlhpc_unfilled"
_KERNELS = "rlhpc_cpu"


class EngineCpuWorker(RecordsKeptTokens, Speculates, CPUWorker):
    """vLLM's CPU worker with reloadable weights, a KV cache that can sleep, a seed per token, routed experts, kept
    tokens and fast norms."""

    def __init__(self, vllm_config: Any, local_rank: int, rank: int, distributed_init_method: str, **rest: Any) -> None:
        _check_head_size(vllm_config.model_config)
        draft = getattr(vllm_config.speculative_config, "draft_model_config", None)
        if draft is not None:
            _check_head_size(draft)
        self._segment = ""
        self._recorder: RouteRecorder | None = None
        self._noise: CpuNoise | None = None
        if vllm_config.parallel_config.tensor_parallel_size > 1:
            # Once the default group is initialized, this only names the shared-memory segments of the tensor-parallel
            # ranks. "env://" would give all jobs the same names, crashed ones included. Ranks on different nodes get
            # different names, so that vLLM uses gloo between them.
            self._segment = f"{_common_name()}-{RankInfo.from_environ().place}"
            distributed_init_method = f"file:///{self._segment}"
        if vllm_config.model_config.enforce_eager:
            _choose_norm_kernels(vllm_config)
        with without_native_lines("NUMA binding: Using MEMBIND policy"):  # said of every engine
            super().__init__(vllm_config, local_rank, rank, distributed_init_method, **rest)

    def init_device(self) -> None:
        super().init_device()
        if self._segment:
            dist.barrier()  # every rank has mapped the segments; unlinked, they are freed when the ranks end
            for file in Path("/dev/shm").glob(f"{self._segment}-*"):
                file.unlink(missing_ok=True)

    def load_model(self, **options: Any) -> None:
        register_model_loader(_LOAD_FORMAT)(_UnfilledLoader)
        self.vllm_config.load_config.load_format = _LOAD_FORMAT
        super().load_model(**options)
        policy, *guessing = self._packed
        for weights in guessing:
            weights.leave(self.model_runner.get_model())
        for weights in (policy, *guessing):
            weights.settle()
        self._noise = cpu_noise(self.model_runner)

    @property
    def _packed(self) -> list[PackedWeights]:
        """Packed weights of the policy and, if there is one, of the model that guesses."""
        models = (self.model_runner.get_model(), getattr(getattr(self.model_runner, "drafter", None), "model", None))
        return [model.packed_weights for model in models if model is not None]

    def record_routed_experts(self) -> None:
        """Begins to record; see ``RouteRecorder``."""
        self._recorder = RouteRecorder(self.model_runner, self.cache_config.block_size)

    def routed_experts_of(self, request_id: str, tokens: int) -> np.ndarray:
        assert self._recorder is not None, "record_routed_experts() comes first"
        return self._recorder.of(request_id, tokens)

    def execute_model(self, scheduler_output: Any) -> Any:
        self.rest_in_pause(scheduler_output)
        output = super().execute_model(scheduler_output)
        if self._recorder is not None and scheduler_output.total_num_scheduled_tokens:
            self._recorder.store(scheduler_output.total_num_scheduled_tokens)
        seed_tokens(self.model_runner, scheduler_output.scheduled_spec_decode_tokens, self._noise)
        return output

    def sleep(self, level: int = 1) -> None:
        """Frees the memory of the KV cache and of the weights, packed and plain."""
        storages = [cache.untyped_storage() for cache in self.model_runner.kv_caches]
        for storage in {storage.data_ptr(): storage for storage in storages}.values():
            _release(storage.data_ptr(), storage.nbytes())
        for weights in self._packed:
            weights.free()

    def wake_up(self, tags: list[str] | None = None) -> None:
        """The cache's memory returns, zeroed, on access; the policy's when it is opened."""
        self.wake_draft(tags)


class _UnfilledLoader(BaseModelLoader):
    """Leaves the parameters uninitialized."""

    def download_model(self, model_config: Any) -> None:
        pass

    def load_weights(self, model: nn.Module, model_config: Any) -> None:
        restrict_to_local_experts(model)
        model.packed_weights = PackedWeights(model, get_current_vllm_config())
        if model_config.runner_type == "draft":
            mark_own_tables(model, Path(model_config.model))


def _check_head_size(model_config: Any) -> None:
    """Raises a UserError for unsupported head sizes, which vLLM would notice only when it generates."""
    backend, what = CPUAttentionBackend, "attention heads"
    if model_config.use_mla:
        backend, what = CPUMLABackend, "latent keys (kv_lora_rank + qk_rope_head_dim)"
    size, sizes = model_config.get_head_size(), backend.get_supported_head_sizes()
    if size not in sizes:
        raise UserError(
            f"vLLM's CPU build does not support {what} of size {size}, only {', '.join(map(str, sizes))}",
            where=f"{model_config.model}/config.json",
            remedy="use a model with another head size, or a GPU",
        )


def _choose_norm_kernels(vllm_config: Any) -> None:
    """Selects RMSNorm kernels that the CPU build has but does not use: one pass instead of five, 4 to 9% of a step."""
    current_platform.import_kernels()
    priority = vllm_config.kernel_config.ir_op_priority
    if _KERNELS not in ir.ops.rms_norm.impls:
        ir.ops.rms_norm.register_impl(_KERNELS, supports_args=_norm_fits)(_rms_norm)
        ir.ops.fused_add_rms_norm.register_impl(_KERNELS, supports_args=_add_norm_fits, inplace=True)(_add_rms_norm)
    vllm_config.compilation_config.ir_enable_torch_wrap = False  # overhead that only a compiler needs
    for providers in (priority.rms_norm, priority.fused_add_rms_norm):
        if _KERNELS not in providers:
            providers.insert(0, _KERNELS)


def _norm_fits(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> bool:
    return variance_size is None and weight is not None and weight.dtype == x.dtype and x.is_contiguous()


def _rms_norm(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> Tensor:
    output = torch.empty_like(x)
    torch.ops._C.rms_norm(output, x, weight, epsilon)
    return output


def _add_norm_fits(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> bool:
    return _norm_fits(x, weight, epsilon, variance_size) and x_residual.is_contiguous()


def _add_rms_norm(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> tuple[Tensor, Tensor]:
    torch.ops._C.fused_add_rms_norm(x, x_residual, weight, epsilon)
    return x, x_residual


def _common_name() -> str:
    """A name that no other job has, the same on every rank."""
    names = [f"rlhpc-{os.environ.get(env.SLURM_JOB_ID, 'local')}-{uuid.uuid4().hex[:12]}"]
    dist.broadcast_object_list(names, src=0)
    return names[0]


def _release(address: int, size: int) -> None:
    """Returns private memory to the system; it reads as zeros afterwards."""
    if sys.platform != "linux":
        ctypes.memset(address, 0, size)
        return
    start, stop = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE, (address + size) // mmap.PAGESIZE * mmap.PAGESIZE
    if start >= stop:
        ctypes.memset(address, 0, size)
        return
    ctypes.memset(address, 0, start - address)
    ctypes.memset(stop, 0, address + size - stop)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), mmap.MADV_DONTNEED):
        raise OSError(ctypes.get_errno(), "madvise on the KV cache failed")
