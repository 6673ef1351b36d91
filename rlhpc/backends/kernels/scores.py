"""From queries and keys to weights of values: the forms of attention scores, and attention by explicit scores."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor


@dataclass(frozen=True)
class Scores:
    """Scores of a layer's attention: ``scale`` times the product of query and key, before the softmax."""

    scale: float
    window: int | None = None  # maximum number of keys of a query, the last one included
    softcap: float | None = None  # scores become softcap * tanh(score / softcap)

    def __post_init__(self) -> None:
        assert self.window is None or self.window > 0, self.window


def attend_by_scores(
    query: Float[Tensor, "segments heads queries d"],
    key: Float[Tensor, "segments kv_heads keys d"],
    value: Float[Tensor, "segments kv_heads keys d"],
    visible: Bool[Tensor, "segments 1 queries keys"],
    scores: Scores,
    sinks: Float[Tensor, " heads"] | None,
) -> Float[Tensor, "segments heads queries d"]:
    """Attention with softcap and sinks, in float32 at least. Memory grows with the square of the length."""
    dtype = torch.promote_types(query.dtype, torch.float32)
    query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    kv_heads, queries = key.size(1), query.size(2)
    # The query heads of a key head are rows of one product: keys need not be repeated.
    rows = query.unflatten(1, (kv_heads, -1)).flatten(2, 3)
    logits = (rows @ key.transpose(2, 3) * scores.scale).unflatten(2, (-1, queries)).flatten(1, 2)
    if scores.softcap is not None:
        logits = torch.tanh(logits / scores.softcap) * scores.softcap
    logits = logits.masked_fill(~visible, -torch.inf)
    if sinks is not None:
        column = sinks.to(dtype)[None, :, None, None].expand(*logits.shape[:3], 1)
        logits = torch.cat([logits, column], dim=-1)
    weights = logits.softmax(-1)[..., : key.size(2)]
    return (weights.unflatten(1, (kv_heads, -1)).flatten(2, 3) @ value).unflatten(2, (-1, queries)).flatten(1, 2)
