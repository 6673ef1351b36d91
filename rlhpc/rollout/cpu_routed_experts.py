"""Records routed experts on a CPU. vLLM's own recorder is a part of its V2 model runner, which needs Triton
(vllm/config/vllm.py, _verify_aux_output_compatibility)."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner


class RouteRecorder:
    """Stores routed experts by slot of the KV cache, so that cached tokens have theirs too."""

    def __init__(self, model_runner: Any, block_size: int) -> None:
        self._runner, self._block_size = model_runner, block_size
        layers = [module for module in model_runner.get_model().modules() if isinstance(module, MoERunner)]
        self._step: dict[int, Int[Tensor, "tokens top_k"]] = {}  # by layer, of the current forward pass
        for place, layer in enumerate(layers):
            layer.router.set_capture_fn(partial(self._step.__setitem__, place))
        router = layers[0].router
        dtype = torch.uint8 if router.global_num_experts <= 256 else torch.int16
        slots = model_runner.kv_cache_config.num_blocks * block_size
        self._routed_experts = torch.zeros(slots, len(layers), router.top_k, dtype=dtype)

    def store(self, tokens: int) -> None:
        """Stores the routed experts of the forward pass that has just run over ``tokens`` tokens."""
        slots = self._runner.input_batch.block_table[0].slot_mapping.gpu[:tokens]
        routed_experts = torch.stack(
            [self._step[place][:tokens] for place in range(self._routed_experts.size(1))], dim=1
        )
        self._routed_experts[slots] = routed_experts.to(self._routed_experts.dtype)

    def of(self, request_id: str, tokens: int) -> np.ndarray:
        """[tokens, layers, top_k] of a request in flight or just finished, whose blocks are not yet reused."""
        # Internally vLLM appends random digits to a request's id.
        (request,) = (r for name, r in self._runner.requests.items() if name.partition("-")[0] == request_id)
        blocks = torch.tensor(request.block_ids[0])
        slots = (blocks[:, None] * self._block_size + torch.arange(self._block_size)).flatten()[:tokens]
        assert len(slots) == tokens
        routed_experts: np.ndarray = self._routed_experts[slots].numpy()
        return routed_experts
