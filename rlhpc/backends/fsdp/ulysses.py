"""Packed attention over context-parallel ranks, by an exchange of heads (Ulysses) or a gather of keys and values."""

from __future__ import annotations

from typing import Any

from jaxtyping import Float
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rlhpc.backends.fsdp.documents import DocumentPack
from rlhpc.backends.kernels.exchanges import gather_visible, heads_to_tokens, tokens_to_heads
from rlhpc.backends.kernels.packed_attention import attend
from rlhpc.backends.kernels.scores import Scores
from rlhpc.sharding.layout import choose_context_method


def attend_across_ranks(
    query: Float[Tensor, "L heads d"],
    key: Float[Tensor, "L kv_heads d"],
    value: Float[Tensor, "L kv_heads dv"],
    pack: DocumentPack,
    scores: Scores,
    sinks: Float[Tensor, " heads"] | None,
) -> Float[Tensor, "L heads dv"]:
    """Attention of this rank's tokens to their documents, of which other ranks of ``pack.group`` hold parts."""
    context, group, attention = pack.context, pack.group, _recomputed if pack.recompute else attend
    if group is None:
        return attention(query, key, value, context.whole, scores, sinks)
    if choose_context_method(query.size(1), key.size(1), group.size(), pack.cp_method).method == "ulysses":
        if sinks is not None:
            # Of the gradient each rank has its own heads' part; that of a parameter is summed over the ranks.
            sinks = sinks.chunk(group.size())[group.rank()]
        query, key, value = tokens_to_heads(query, key, value, context, group)
        return heads_to_tokens(attention(query, key, value, context.whole, scores, sinks), context, group)
    key, value = gather_visible(key, value, context, group)
    return attention(query, key, value, context.chunks, scores, sinks)


def _recomputed(*arguments: Any) -> Tensor:
    return checkpoint(attend, *arguments, use_reentrant=False, preserve_rng_state=False)
