"""Expert parallelism of an engine on CPUs, whose kernels expect every expert on every rank and otherwise crash."""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import nn


def restrict_to_local_experts(model: nn.Module) -> None:
    """Limits each layer's kernel to this rank's experts. Call it before the weights are packed."""
    for layer in model.modules():
        if getattr(layer, "expert_map", None) is not None and hasattr(layer, "quant_method"):
            layer.quant_method.experts_cls = _local(layer.quant_method.experts_cls)


@cache
def _local(kernel: Any) -> Any:
    class LocalExperts(kernel):
        """The kernel with the ids of this rank's experts; tokens of other experts get weight 0."""

        def apply(self, *, topk_weights: Any, topk_ids: Any, expert_map: Any, **rest: Any) -> None:
            local = expert_map[topk_ids.long()]  # -1: on another rank
            weights, ids = topk_weights * (local >= 0), local.clamp(min=0).to(topk_ids.dtype)
            super().apply(topk_weights=weights, topk_ids=ids, expert_map=None, **rest)

    return LocalExperts
