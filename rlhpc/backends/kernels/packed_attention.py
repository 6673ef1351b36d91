"""Causal attention over segments of a packed batch, by fused kernels or by PyTorch's operations."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from rlhpc.backends.kernels.fused_attention import attend_fused
from rlhpc.backends.kernels.scores import Scores, attend_by_scores
from rlhpc.backends.kernels.segments import Segments


def attend(
    query: Float[Tensor, "queries heads d"],
    key: Float[Tensor, "keys kv_heads d"],
    value: Float[Tensor, "keys kv_heads dv"],
    segments: Segments,
    scores: Scores,
    sinks: Float[Tensor, " heads"] | None = None,
) -> Float[Tensor, "queries heads dv"]:
    """Attention of each segment's queries to its keys; by fused kernels for half precision on a GPU.

    ``sinks``: one more score for each head, which takes a share of the softmax and adds nothing to the output. Raises
    UserError if no installed kernel computes these scores.
    """
    fused = query.is_cuda and query.dtype in (torch.bfloat16, torch.float16)
    function = attend_fused if fused else _attend_padded
    # Kernels require values as long as keys: zeros appended to values append zeros to the output, and those appended to
    # queries and keys change no score.
    value_dim, dim = value.size(-1), max(key.size(-1), value.size(-1))
    query, key, value = (F.pad(x, (0, dim - x.size(-1))) if x.size(-1) < dim else x for x in (query, key, value))
    return function(query, key, value, segments, scores, sinks)[..., :value_dim]


def _attend_padded(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, scores: Scores, sinks: Tensor | None
) -> Tensor:
    """PyTorch's attention, or explicit scores, one call for each bucket of segments of similar lengths."""
    grouped = query.size(1) != key.size(1)
    output = torch.zeros_like(query)
    for bucket in segments.buckets:
        q, k, v = (
            x.index_select(0, rows.flatten()).unflatten(0, rows.shape).transpose(1, 2)
            for x, rows in ((query, bucket.query_rows), (key, bucket.key_rows), (value, bucket.key_rows))
        )
        if scores.softcap is None and sinks is None:
            mask = bucket.mask(scores.window)
            attended = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, scale=scores.scale, enable_gqa=grouped
            )
        else:
            attended = attend_by_scores(q, k, v, bucket.visible(scores.window), scores, sinks).to(query.dtype)
        attended = attended.transpose(1, 2).flatten(0, 1).index_select(0, bucket.cells)
        output = output.index_copy(0, bucket.queries, attended)
    return output
