"""Norm of every layer, also in images with apex or Transformer Engine."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from rlhpc.backends.kernels.rms_norm import rms_norm
from rlhpc.parallel.compat import device


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm (Zhang and Sennrich 2019). Under sequence parallelism its gradient is summed over tp."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device()))
        self.weight.sequence_parallel = config.sequence_parallel  # read by finalize_model_grads

    def forward(self, x: Float[Tensor, "... hidden"]) -> Float[Tensor, "... hidden"]:
        return rms_norm(x, self.weight, self.eps)
