"""The GPU worker over vLLM's CPU worker, with weights as they are on a GPU: used as they were loaded."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from vllm.model_executor.layers import utils
from vllm.v1.worker.cpu_worker import CPUWorker

from rlhpc.rollout import vllm_gpu


class Worker(vllm_gpu.Worker, CPUWorker):
    """``execute_model`` is the GPU worker's own; beneath it is vLLM's CPU worker."""

    def load_model(self, **options: Any) -> None:
        def keep(layer: torch.nn.Module, remove_weight: bool) -> None:
            if layer.weight.dim() == 2:
                layer.cpu_linear = F.linear

        packs, utils.dispatch_cpu_unquantized_gemm = utils.dispatch_cpu_unquantized_gemm, keep
        try:
            super().load_model(**options)
        finally:
            utils.dispatch_cpu_unquantized_gemm = packs
