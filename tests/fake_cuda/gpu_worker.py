"""The GPU worker over vLLM's CPU worker, with weights as they are on a GPU: used as they were loaded."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import _disable_current_modes
from vllm.model_executor.layers import utils
from vllm.platforms import current_platform
from vllm.v1.worker.cpu_worker import CPUWorker

from rlhpc.rollout import vllm_arguments, vllm_gpu, vllm_weights
from tests.helpers.fake_cuda import FakeCuda


class Worker(vllm_gpu.EngineGpuWorker, CPUWorker):
    """``execute_model`` is the GPU worker's own; beneath it is vLLM's CPU worker.

    Nothing moves when it sleeps. The stand-in for CUDA counts its memory, as the driver does.
    """

    _weights: dict[int, int]  # bytes by address of what vLLM has allocated for parameters

    def load_model(self, **options: Any) -> None:
        def keep(layer: torch.nn.Module, remove_weight: bool) -> None:
            if layer.weight.dim() == 2:
                layer.cpu_linear = F.linear

        packs, utils.dispatch_cpu_unquantized_gemm = utils.dispatch_cpu_unquantized_gemm, keep
        try:
            super().load_model(**options)
        finally:
            utils.dispatch_cpu_unquantized_gemm = packs
        storages = [parameter.untyped_storage() for parameter in self.get_model().parameters()]
        self._weights = {one.data_ptr(): one.nbytes() for one in storages}
        _loaded.append(self._weights)

    def execute_model(self, scheduler_output: Any) -> Any:
        """With the CPU's kernels, which read weights that are shared with a trainer on the device as their own."""
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            return super().execute_model(scheduler_output)

    def sleep(self, level: int = 1) -> None:
        super().sleep(level)
        for parameter in self.get_model().parameters():  # the CPU's kernels have run through the engine's start
            FakeCuda.active.adopt(parameter)
        FakeCuda.active.mapped.clear()

    def wake_up(self, tags: list[str] | None = None) -> None:
        super().wake_up(tags)
        caches = {tensor.data_ptr(): tensor.nbytes for tensor in self.model_runner.kv_caches}
        sizes = {"weights": sum(self._weights.values()), "kv_cache": sum(caches.values())}
        FakeCuda.active.mapped.update({tag: sizes[tag] for tag in tags or sizes})


_loaded: list[dict[int, int]] = []  # of each worker


def free_weights(replaced: Sequence[torch.Tensor], used: Sequence[torch.Tensor]) -> None:
    """``vllm_memory.free_weights``, whose allocator vLLM's CPU build lacks: of the last worker's weights."""
    in_use = {tensor.untyped_storage().data_ptr() for tensor in used}
    for tensor in replaced:
        if tensor.untyped_storage().data_ptr() not in in_use:
            _loaded[-1].pop(tensor.untyped_storage().data_ptr(), None)
    FakeCuda.active.mapped["weights"] = sum(_loaded[-1].values())


def as_on_a_gpu() -> Any:
    """vLLM's CPU platform with a worker for GPUs."""
    stack = contextlib.ExitStack()
    stack.enter_context(mock.patch.object(vllm_arguments, "GPU_WORKER", f"{__name__}.Worker"))
    stack.enter_context(mock.patch.object(type(current_platform), "is_sleep_mode_available", return_value=True))
    stack.enter_context(mock.patch.object(vllm_weights, "free_weights", free_weights))
    return stack
