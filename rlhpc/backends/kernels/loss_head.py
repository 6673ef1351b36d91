"""Log-probs and entropy from hidden states and the weight of a head whose vocabulary tensor-parallel ranks share.

Logits exist in blocks of columns: of some tokens of the vocabulary, for all rows. The forward pass stores sums of each
row; the backward pass computes a block again and replaces it with its gradient. A block of columns completes the
gradient of its part of the weight, so that nothing of the weight's size is added up block by block.

Targets of some rows were drawn from a few hundred tokens of the vocabulary at most. The distribution of such a row is
over these kept tokens: their logits are taken out of each block of columns, and their gradients put back into it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float, Float32, Int32, Int64
from torch import Tensor

from rlhpc.api import TokenStats
from rlhpc.backends.kernels.compiled import compiled
from rlhpc.backends.kernels.gradients import add_product, mark_added

# plan/estimates/activations.py has the figures of a GPU.
BLOCK_BYTES = 64 << 20  # of a block of logits; products on a CPU copy their operands
BLOCK_BYTES_GPU = 160 << 20
MIN_COLUMNS = 2048  # fewer: adding up the gradient of hidden states costs more than the products
# Between the beginnings of rows: with an odd number cuBLAS selects kernels of Turing, five times slower on an H100
# (docs/measurements/2026-11-h100.md).
_ALIGNED_COLUMNS = 64
# Elements that one call computes on, in float32. On a CPU they stay in cache through all its passes.
CHUNK_ELEMENTS = 1 << 19
CHUNK_ELEMENTS_GPU = 1 << 23

Curve = tuple[float | None, float]  # softcap, and factor after it
_NOWHERE = -1e30  # maximum of a row without a kept token on this rank; finite, so that ranks' sums merge


@dataclass(frozen=True)
class Head:
    """Distribution of logits: x = scale * softcap * tanh(hidden @ weight.T / softcap) / temperature.

    ``group``: ranks that share the vocabulary, in rank order; None: this rank has all of it. ``softcap`` None: no tanh.
    """

    vocab_size: int
    group: dist.ProcessGroup | None
    temperature: float = 1.0
    softcap: float | None = None
    scale: float = 1.0

    @property
    def ranks(self) -> int:
        """Number of ranks that share the vocabulary."""
        return self.group.size() if self.group is not None else 1

    @property
    def rank(self) -> int:
        """This rank's place among them."""
        return self.group.rank() if self.group is not None else 0

    @property
    def curve(self) -> Curve:
        """Maps logits to x."""
        return self.softcap, self.scale / self.temperature


def head_stats(
    hidden: Float[Tensor, "N h"],
    weight: Float[Tensor, "V_local h"],
    targets: Int64[Tensor, " N"],
    head: Head,
    kept: Int32[Tensor, "N most"] | None = None,
) -> TokenStats:
    """Natural-log probability of each target, and entropy of its distribution. One all-gather of [4, N] forward.

    Padding rows of ``weight`` beyond the vocabulary are ignored. The gradient of ``hidden`` is that of this rank's part
    of the vocabulary: what distributes ``hidden`` must sum it over the group, as
    ``copy_to_tensor_model_parallel_region`` does. ``kept``: 1 + a token that the target was drawn from, 0: none; a row
    with any has a distribution over those tokens.
    """
    return TokenStats(*_Head.apply(hidden, weight, targets, head, kept))


class _Head(torch.autograd.Function):
    """Saves ``hidden`` and float32 numbers of each row."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, head: Head, kept: Tensor | None
    ) -> tuple[Float32[Tensor, " N"], Float32[Tensor, " N"]]:
        target = targets - head.rank * len(weight)
        columns = None if kept is None else KeptColumns(kept, head.rank * len(weight))
        sums = []
        for start, block in _blocks(hidden, weight, head):
            sums.append(_block_sums(block, start, target, head))
            if columns is not None:
                columns.take(block, start, lambda logits: _scaled(logits, head.curve))
        merged = _merged(torch.stack([s[:3] for s in sums]))
        if columns is not None:
            merged = columns.override(merged)
        local = torch.cat([merged, sum(s[3] for s in sums)[None]])
        if head.ranks > 1 and len(hidden):
            every = local.new_empty(head.ranks * len(local), local.size(1))
            dist.all_gather_into_tensor(every, local, group=head.group)
            gathered = every.view(-1, *local.shape)
            local = torch.cat([_merged(gathered[:, :3]), gathered[:, 3].sum(0)[None]])
        maximum, total, weighted, picked = local.unbind()
        log_total, mean = maximum + total.log(), maximum + weighted / total
        ctx.save_for_backward(hidden, weight, target, picked, log_total, mean, kept)
        ctx.head = head
        ctx.set_materialize_grads(False)
        return picked - log_total, log_total - mean

    @staticmethod
    def backward(
        ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        hidden, weight, target, picked, log_total, mean, kept = ctx.saved_tensors
        if grad_log_probs is None:
            grad_log_probs = torch.zeros_like(log_total)
        rows = (log_total, mean, grad_log_probs, grad_entropy)
        # Replaced whole, in float32: for a probable token, 1 - p is far smaller than the rounding of p.
        at_target = _target_gradient(picked, *rows, ctx.head.curve)
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.zeros_like(hidden, dtype=torch.float32) if needs_hidden else None
        grad_weight = _WeightGradient(weight, hidden) if needs_weight else None
        columns = None if kept is None else KeptColumns(kept, ctx.head.rank * len(weight))
        for start, block in _blocks(hidden, weight, ctx.head):
            few = None if columns is None else columns.logits(block, start)
            _replace_by_gradients(block, rows, ctx.head.curve)
            if columns is not None and few is not None:
                _replace_by_gradients(few, rows, ctx.head.curve)
                columns.put_gradients(block, start, few)
            column, here = _column(target, start, block)
            value = torch.where(here, at_target.to(block.dtype), block.gather(1, column[:, None])[:, 0])
            block.scatter_(1, column[:, None], value[:, None])
            if grad_hidden is not None:
                _add(grad_hidden, block, weight[start : start + block.size(1)])
            if grad_weight is not None:
                grad_weight.take(start, block)
        del block
        return (
            None if grad_hidden is None else grad_hidden.to(hidden.dtype),
            None if grad_weight is None else grad_weight.finished(),
            None,
            None,
            None,
        )


class _WeightGradient:
    """Gradient of the weight, block by block: in its ``main_grad`` where it has one."""

    def __init__(self, weight: Tensor, hidden: Tensor) -> None:
        self._weight, self._hidden = weight, hidden
        self._buffer = getattr(weight, "main_grad", None)
        self._own = torch.zeros_like(weight) if self._buffer is None else None

    def take(self, start: int, block: Float[Tensor, "N columns"]) -> None:
        """Adds a block's part: rows from ``start`` on."""
        rows = slice(start, start + block.size(1))
        if self._own is None:
            add_product(self._buffer[rows], block, self._hidden)
        else:
            torch.mm(block.t(), self._hidden, out=self._own[rows])

    def finished(self) -> Tensor:
        """Value that the backward pass returns for the weight."""
        return mark_added(self._weight) if self._own is None else self._own


def _blocks(hidden: Tensor, weight: Tensor, head: Head) -> Iterator[tuple[int, Float[Tensor, "N columns"]]]:
    """First column and logits of each block, before softcap and scale; a block reuses the memory of the former."""
    first = head.rank * len(weight)
    columns = min(len(weight), head.vocab_size - first)
    assert columns > 0, f"rank {head.rank} has no part of a vocabulary of {head.vocab_size}"
    most = BLOCK_BYTES_GPU if hidden.is_cuda else BLOCK_BYTES
    step = max(MIN_COLUMNS, most // max(1, len(hidden) * hidden.element_size()))
    step = min(_aligned(columns), max(1, step // _ALIGNED_COLUMNS) * _ALIGNED_COLUMNS)
    memory = hidden.new_empty(len(hidden), step)
    for start in range(0, columns, step):
        width = min(step, columns - start)
        block = memory.view(-1)[: len(hidden) * _aligned(width)].view(len(hidden), _aligned(width))[:, :width]
        yield start, torch.mm(hidden, weight[start : start + width].t(), out=block)


def _aligned(columns: int) -> int:
    """Columns from one row of a block to the next."""
    return -(-columns // _ALIGNED_COLUMNS) * _ALIGNED_COLUMNS


def _block_sums(block: Float[Tensor, "N columns"], start: int, target: Tensor, head: Head) -> Float32[Tensor, "4 N"]:
    """Maximum, both sums (see ``_chunk_sums``) and x at the target, or 0 where it is in another block."""
    sums = torch.empty(4, len(block), dtype=torch.float32, device=block.device)
    for part in _chunks(block):
        for row, values in zip(sums, _chunk_sums(block[part], head.curve), strict=False):
            row[part] = values
    column, here = _column(target, start, block)
    picked = _scaled(block.gather(1, column[:, None])[:, 0], head.curve)
    sums[3] = torch.where(here, picked, 0.0)
    return sums


def _column(target: Tensor, start: int, block: Tensor) -> tuple[Int64[Tensor, " N"], Tensor]:
    """Column of each target in a block, and whether it has one there."""
    column = target - start
    return column.clamp(0, block.size(1) - 1), (column >= 0) & (column < block.size(1))


def _merged(parts: Float32[Tensor, "parts 3 N"]) -> Float32[Tensor, "3 N"]:
    """Maximum and sums over parts of the columns."""
    maximum = parts[:, 0].amax(0)
    shift = parts[:, 0] - maximum
    scale = shift.exp()
    return torch.stack([maximum, (scale * parts[:, 1]).sum(0), (scale * (parts[:, 2] + shift * parts[:, 1])).sum(0)])


def _chunks(block: Tensor) -> list[slice]:
    step = max(1, (CHUNK_ELEMENTS_GPU if block.is_cuda else CHUNK_ELEMENTS) // block.size(1))
    return [slice(start, start + step) for start in range(0, len(block), step)]


def _add(total: Float32[Tensor, "N h"], block: Float[Tensor, "N columns"], weight: Float[Tensor, "columns h"]) -> None:
    if total.dtype == block.dtype:
        total.addmm_(block, weight)
    else:
        total.add_(block @ weight)


def _scaled(logits: Tensor, curve: Curve) -> Tensor:
    """x in memory of its own, so that what follows may replace it: uncompiled, each new tensor costs a CPU more."""
    softcap, factor = curve
    x = logits.to(torch.float32, copy=True)
    if softcap is not None:
        x.div_(softcap).tanh_()
        factor *= softcap
    return x if factor == 1.0 else x.mul_(factor)


@compiled
def _chunk_sums(logits: Tensor, curve: Curve) -> tuple[Tensor, Tensor, Tensor]:
    """Maximum m, sum of exp(x - m) and sum of exp(x - m) (x - m) of each row."""
    x = _scaled(logits, curve)
    maximum = x.amax(-1)
    exponentials = x.sub_(maximum[:, None]).exp()
    total = exponentials.sum(-1)
    return maximum, total, x.mul_(exponentials).sum(-1)


def _replace_by_gradients(logits: Tensor, rows: Sequence[Tensor | None], curve: Curve) -> None:
    """See ``_replace_by_gradient``; ``rows``: its other tensors."""
    for part in _chunks(logits):
        selected = (row if row is None else row[part] for row in rows)
        _replace_by_gradient(logits[part], *selected, curve)


@compiled
def _replace_by_gradient(
    logits: Tensor,
    log_total: Tensor,
    mean: Tensor,
    grad_log_probs: Tensor,
    grad_entropy: Tensor | None,
    curve: Curve,
) -> None:
    """d log p(target) / dx_j = [j = target] - p_j, without the first term;  d entropy / dx_j = -p_j (x_j - E[x])."""
    softcap, factor = curve
    x = _scaled(logits, curve)
    weight = (grad_log_probs * -factor)[:, None]
    if grad_entropy is not None:
        weight = (x - mean[:, None]).mul_((grad_entropy * -factor)[:, None]).add_(weight)
    if softcap is not None:
        weight = (x / (softcap * factor)).square_().neg_().add_(1).mul_(weight)
    logits.copy_(x.sub_(log_total[:, None]).exp_().mul_(weight))


@compiled
def _target_gradient(
    picked: Tensor,
    log_total: Tensor,
    mean: Tensor,
    grad_log_probs: Tensor,
    grad_entropy: Tensor | None,
    curve: Curve,
) -> Float32[Tensor, " N"]:
    """Gradient of the targets' logits."""
    softcap, factor = curve
    probability = (picked - log_total).exp()
    gradient = -torch.expm1(picked - log_total) * grad_log_probs
    if grad_entropy is not None:
        gradient = gradient - grad_entropy * probability * (picked - mean)
    if softcap is not None:
        gradient = gradient * (1 - (picked / (softcap * factor)).square())
    return gradient * factor


class KeptColumns:
    """Places of the kept tokens of rows among the columns that begin at ``first``."""

    def __init__(self, kept: Int32[Tensor, "N most"], first: int) -> None:
        """``kept``: 1 + a token; 0: none. A row without any is over the whole vocabulary."""
        self.rows: Bool[Tensor, " N"] = (kept > 0).any(1)
        self._columns = kept.long() - 1 - first
        self._given = kept > 0
        self._x = torch.full(kept.shape, -torch.inf, dtype=torch.float32, device=kept.device)

    def take(self, block: Float[Tensor, "N columns"], start: int, scaled: Callable[[Tensor], Tensor]) -> None:
        """Remembers x of the kept tokens in a block; ``scaled``: from logits to x."""
        column, here = self._place(start, block)
        self._x = torch.where(here, scaled(block.gather(1, column)), self._x)

    def override(self, sums: Float32[Tensor, "3 N"]) -> Float32[Tensor, "3 N"]:
        """Maximum m, sum of exp(x - m) and sum of exp(x - m) (x - m), of rows with kept tokens over those alone."""
        found = self._x > -torch.inf
        maximum = torch.where(found.any(1), self._x.amax(1), _NOWHERE)
        shifted = torch.where(found, self._x - maximum[:, None], 0.0)
        exponentials = torch.where(found, shifted.exp(), 0.0)
        own = torch.stack([maximum, exponentials.sum(1), (exponentials * shifted).sum(1)])
        return torch.where(self.rows, own, sums)

    def logits(self, block: Float[Tensor, "N columns"], start: int) -> Float[Tensor, "N most"]:
        """Logits of the kept tokens in a block, and of others where there are fewer."""
        return block.gather(1, self._place(start, block)[0])

    def put_gradients(self, block: Float[Tensor, "N columns"], start: int, gradients: Float[Tensor, "N most"]) -> None:
        """Replaces a block's gradients, of rows with kept tokens, by those of ``logits`` and 0 elsewhere."""
        column, here = self._place(start, block)
        block.masked_fill_(self.rows[:, None], 0)
        block.scatter_add_(1, column, torch.where(here, gradients, 0))

    def _place(self, start: int, block: Tensor) -> tuple[Int64[Tensor, "N most"], Bool[Tensor, "N most"]]:
        """Column of each kept token in a block, and whether it has one there."""
        column = self._columns - start
        here = self._given & (column >= 0) & (column < block.size(1))
        return column.clamp(0, block.size(1) - 1), here
