"""Context parallelism: a rank's part of a packed batch, and the exchanges between the ranks that share its sequences.

Sizes and orders of tokens as in ``sharding/context_split.py``: T in the batch, L on this rank, P on all ranks together.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float, Int64
from torch import Tensor

from rlhpc.api import PackedBatch
from rlhpc.backends.megatron.packed import ContextIndex, PackedParams, RotaryTable, RoutedExperts, packed_params
from rlhpc.sharding.context_split import ContextSplit


@dataclass(frozen=True)
class LocalBatch:
    """Input of one context-parallel rank's model."""

    tokens: Int64[Tensor, " L"]
    positions: Int64[Tensor, " L"]
    params: PackedParams

    def select(self, values: Float[Tensor, "T ..."]) -> Float[Tensor, "L ..."]:
        """This rank's part of per-token values of the batch; 0 for padding tokens."""
        return _select(values, self.params.context)

    def gather(self, values: Float[Tensor, "L ..."], group: dist.ProcessGroup | None) -> Float[Tensor, "T ..."]:
        """See ``gather_packed``."""
        return gather_packed(values, self.params.context, group)


def local_batch(
    batch: PackedBatch, split: ContextSplit, rank: int, rope: RotaryTable, router_part: tuple[int, int] = (0, 1)
) -> LocalBatch:
    """The part of ``batch`` for ``rank`` of the context-parallel group.

    ``router_part``: (index, count) of the equal parts of its tokens, one of which this rank's routers see.
    """
    context = ContextIndex(split, rank, batch.tokens.device)
    positions = torch.from_numpy(context.part.positions).to(batch.tokens.device)
    experts = None
    if batch.routed_experts is not None:
        index, count = router_part
        experts = RoutedExperts(_select(batch.routed_experts, context).chunk(count)[index], batch.routed_layers)
    return LocalBatch(_select(batch.tokens, context), positions, packed_params(context, rope, positions, experts))


def gather_packed(
    values: Float[Tensor, "L ..."], context: ContextIndex, group: dist.ProcessGroup | None
) -> Float[Tensor, "T ..."]:
    """Every rank's values in the batch's order, on every rank of the context-parallel group.

    The backward pass selects the rank's own part of its own gradient: each rank computes the loss of the whole batch,
    and the gradients of parameters are summed over the group later.
    """
    return values if context.split.is_trivial else _GatherPacked.apply(values, context, group)


def gather_visible(
    key: Float[Tensor, "L kv_heads d"],
    value: Float[Tensor, "L kv_heads dv"],
    context: ContextIndex,
    group: dist.ProcessGroup,
) -> tuple[Float[Tensor, "keys kv_heads d"], Float[Tensor, "keys kv_heads dv"]]:
    """Keys and values of all ranks, laid out for the local queries in the order of ``context.chunks``."""
    gathered = _Gather.apply(_join_heads(key, value), group)
    # A key is visible to one or both of a rank's chunks of its sequence. The sum of two terms does not depend on the
    # order in which a GPU adds them, so that the backward pass is reproducible.
    return _split_heads(gathered.index_select(0, context.visible), key, value)


def tokens_to_heads(
    query: Float[Tensor, "L heads d"],
    key: Float[Tensor, "L kv_heads d"],
    value: Float[Tensor, "L kv_heads dv"],
    context: ContextIndex,
    group: dist.ProcessGroup,
) -> tuple[Tensor, Tensor, Tensor]:
    """Exchanges all heads of a rank's tokens for some heads of whole sequences (Ulysses, arXiv 2309.14509).

    Each rank receives heads / cp query heads of all P tokens and the key and value heads that they attend to; a key or
    value head that several ranks need is sent to each.
    """
    cp, kv_heads = group.size(), key.size(1)
    copies = lcm(kv_heads, cp) // kv_heads
    if copies > 1:
        key, value = key.repeat_interleave(copies, dim=1), value.repeat_interleave(copies, dim=1)
    by_rank = [x.unflatten(1, (cp, -1)).transpose(0, 1) for x in (query, key, value)]
    exchanged = _Exchange.apply(_join_heads(*by_rank), group).flatten(0, 1)
    return _split_heads(exchanged.index_select(0, context.gathered_of_whole), *(x[0] for x in by_rank))


def heads_to_tokens(
    output: Float[Tensor, "P local_heads dv"], context: ContextIndex, group: dist.ProcessGroup
) -> Float[Tensor, "L heads dv"]:
    """Inverse of ``tokens_to_heads``, for the output."""
    by_rank = output.index_select(0, context.whole_of_gathered).unflatten(0, (group.size(), -1))
    return _Exchange.apply(by_rank, group).transpose(0, 1).flatten(1, 2)


def _select(values: Tensor, context: ContextIndex) -> Tensor:
    if context.split.is_trivial:
        return values
    taken = values.index_select(0, context.packed.clamp(min=0))
    return taken.masked_fill((context.packed < 0).view(-1, *[1] * (values.dim() - 1)), 0)


def _join_heads(*tensors: Float[Tensor, "*tokens heads dim"]) -> Float[Tensor, "*tokens width"]:
    """Concatenates the tensors, for a single exchange."""
    return torch.cat([x.flatten(-2) for x in tensors], dim=-1)


def _split_heads(joined: Float[Tensor, "tokens width"], *like: Float[Tensor, "_ heads dim"]) -> tuple[Tensor, ...]:
    """Inverse of ``_join_heads``, with heads and dims of ``like``."""
    parts = joined.split([x.size(1) * x.size(2) for x in like], dim=-1)
    return tuple(part.unflatten(-1, x.shape[1:]) for part, x in zip(parts, like, strict=True))


def _all_gather(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Every rank's ``x``, concatenated."""
    if group is None or group.size() == 1:
        return x
    gathered = x.new_empty((group.size() * len(x), *x.shape[1:]))
    dist.all_gather_into_tensor(gathered, x.contiguous(), group=group)
    return gathered


class _GatherPacked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, context: ContextIndex, group: dist.ProcessGroup | None) -> Tensor:
        ctx.context = context
        return _all_gather(values, group).index_select(0, context.gathered_of_packed)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _select(gradient, ctx.context), None, None


class _Gather(torch.autograd.Function):
    """All-gather; its backward pass is a reduce-scatter, the sum of all ranks' gradients of this rank's tokens."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_gather(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        own = gradient.new_empty((len(gradient) // ctx.group.size(), *gradient.shape[1:]))
        dist.reduce_scatter_tensor(own, gradient.contiguous(), group=ctx.group)
        return own, None


class _Exchange(torch.autograd.Function):
    """All-to-all: sends ``x[i]`` to rank i. It is its own backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Float[Tensor, "cp ..."], group: dist.ProcessGroup) -> Float[Tensor, "cp ..."]:
        ctx.group = group
        exchanged = torch.empty_like(x, memory_format=torch.contiguous_format)
        dist.all_to_all_single(exchanged, x.contiguous(), group=group)
        return exchanged

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _Exchange.apply(gradient, ctx.group), None
