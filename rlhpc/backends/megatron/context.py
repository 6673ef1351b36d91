"""Context parallelism: a rank's part of a packed batch, as input of Megatron's model.

Sizes and orders of tokens as in ``sharding/context_split.py``: T in the batch, L on this rank, P on all ranks together.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from jaxtyping import Float, Int64
from torch import Tensor

from rlhpc.api import PackedBatch
from rlhpc.backends.kernels.exchanges import ContextIndex, gather_packed, select_local
from rlhpc.backends.megatron.packed import PackedParams, RotaryTable, RoutedExperts, packed_params
from rlhpc.sharding.context_split import ContextSplit


@dataclass(frozen=True)
class LocalBatch:
    """Input of one context-parallel rank's model."""

    tokens: Int64[Tensor, " L"]
    positions: Int64[Tensor, " L"]
    params: PackedParams

    def select(self, values: Float[Tensor, "T ..."]) -> Float[Tensor, "L ..."]:
        """This rank's part of per-token values of the batch; 0 for padding tokens."""
        return select_local(values, self.params.context)

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
        experts = RoutedExperts(select_local(batch.routed_experts, context).chunk(count)[index], batch.routed_layers)
    return LocalBatch(select_local(batch.tokens, context), positions, packed_params(context, rope, positions, experts))
