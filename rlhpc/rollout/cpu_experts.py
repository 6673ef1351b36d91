"""Whole experts on each rank of an engine on a CPU, whose kernels take every expert to be there and crash."""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import nn


def keep_to_held_experts(model: nn.Module) -> None:
    """Before the weights are packed. Layers that hold all their experts stay as they are."""
    for layer in model.modules():
        if getattr(layer, "expert_map", None) is not None and hasattr(layer, "quant_method"):
            layer.quant_method.experts_cls = _held(layer.quant_method.experts_cls)


@cache
def _held(kernel: type) -> type:
    class HeldExperts(kernel):  # type: ignore[misc]
        """The kernel with ids of this rank's own experts; what went to others counts nothing here."""

        def apply(self, *, topk_weights: Any, topk_ids: Any, expert_map: Any, **rest: Any) -> None:
            local = expert_map[topk_ids.long()]  # -1: another rank's
            weights, ids = topk_weights * (local >= 0), local.clamp(min=0).to(topk_ids.dtype)
            super().apply(topk_weights=weights, topk_ids=ids, expert_map=None, **rest)

    return HeldExperts
