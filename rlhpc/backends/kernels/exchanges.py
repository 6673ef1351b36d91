"""Exchanges between context-parallel ranks, which share the sequences of a packed batch.

Sizes and orders of tokens as in ``sharding/context_split.py``: T in the batch, L on this rank, P on all ranks together.
"""

from __future__ import annotations

from functools import cached_property
from math import lcm
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from jaxtyping import Float, Int64
from torch import Tensor

from rlhpc.backends.kernels.segments import Segments
from rlhpc.sharding.context_split import ContextSplit


class ContextIndex:
    """A split's indices on this rank's device, each created at first use and shared by all layers.

    Sizes and orders of tokens as in ``rlhpc.sharding.context_split``.
    """

    def __init__(self, split: ContextSplit, rank: int, device: torch.device) -> None:
        self.split, self.part, self.device = split, split.part(rank), device

    @cached_property
    def packed(self) -> Int64[Tensor, " L"]:
        """Place of each local token in the batch; -1 for padding."""
        return self._tensor(self.part.packed)

    @cached_property
    def gathered_of_packed(self) -> Int64[Tensor, " T"]:
        return self._tensor(self.split.gathered_of_packed)

    @cached_property
    def gathered_of_whole(self) -> Int64[Tensor, " P"]:
        return self._tensor(self.split.gathered_of_whole)

    @cached_property
    def whole_of_gathered(self) -> Int64[Tensor, " P"]:
        return self._tensor(self.split.whole_of_gathered)

    @cached_property
    def whole(self) -> Segments:
        """Whole sequences, on a rank that has all their tokens for some heads."""
        lengths = self.split.padded_lengths
        return Segments(lengths, lengths, self.device)

    @cached_property
    def visible(self) -> Int64[Tensor, " keys"]:
        """Keys that the local queries attend to, segment after segment, in gathered order."""
        return self._tensor(self.part.visible)

    @cached_property
    def chunks(self) -> Segments:
        """The local queries, with their keys in the order of ``visible``."""
        return Segments(self.part.query_lengths, self.part.visible_lengths, self.device)

    def _tensor(self, index: np.ndarray) -> Tensor:
        # From pageable memory CUDA copies to a buffer of its own first: this waits for no work of the GPU.
        return torch.from_numpy(index).to(self.device, non_blocking=True)


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


def select_local(values: Tensor, context: ContextIndex, padding: int = 0) -> Tensor:
    """This rank's part of per-token values of the batch, and ``padding`` for tokens that only fill up."""
    if context.split.is_trivial:
        return values
    taken = values.index_select(0, context.packed.clamp(min=0))
    return taken.masked_fill((context.packed < 0).view(-1, *[1] * (values.dim() - 1)), padding)


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
        return select_local(gradient, ctx.context), None, None


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
