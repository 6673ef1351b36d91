"""The part of a loss head for rows whose targets were drawn from some tokens of the vocabulary only.

The distribution of such a row is over its kept tokens, a few hundred at most: their logits are taken out of each block
of columns, and their gradients put back into it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float, Float32, Int32, Int64
from torch import Tensor

_NOWHERE = -1e30  # maximum of a row without a kept token on this rank; finite, so that ranks' sums merge


class KeptColumns:
    """Where the kept tokens of rows are among the columns that begin at ``first``."""

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
