"""The norm of every layer: apex's fused kernel where the site has built apex, PyTorch's elsewhere."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from rlhpc.parallel.compat import device


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm (Zhang and Sennrich 2019). Under sequence parallelism its gradient is summed over tp."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device()))
        self.weight.sequence_parallel = config.sequence_parallel  # read by finalize_model_grads

    def forward(self, x: Float[Tensor, "... hidden"]) -> Float[Tensor, "... hidden"]:
        fused = _apex_rms_norm() if x.is_cuda else None
        if fused is not None:
            return fused(x, self.weight, self.weight.shape, self.eps)
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


@functools.cache
def _apex_rms_norm() -> Callable[..., Tensor] | None:
    try:
        from apex.normalization.fused_layer_norm import fused_rms_norm_affine
    except ImportError:
        return None
    return fused_rms_norm_affine
