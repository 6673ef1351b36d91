"""The documents of the packed batch that a model computes on, beside its inputs.

Attention needs their bounds. Some architectures of transformers do not pass keyword arguments on to it, and
recomputation calls it in the backward pass, in another thread on a GPU. The pack is therefore a value of the process:

    pack = DocumentPack(lengths, device, group)
    with attending_to(pack):
        logits = model(input_ids=pack.select(tokens)[None], position_ids=pack.positions[None], use_cache=False).logits
        loss(logits).backward()
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property

import torch
import torch.distributed as dist
from jaxtyping import Float, Int64
from torch import Tensor

from rlhpc.backends.kernels.exchanges import ContextIndex, gather_packed, select_local
from rlhpc.sharding.context_method import ContextMethod
from rlhpc.sharding.context_split import split_context

_current: DocumentPack | None = None


class DocumentPack:
    """Documents of a packed batch of T tokens, of which this rank holds L.

    ``group``: the ranks that share the documents (context parallelism); ``cp_method``: their exchange, by default the
    one that suits the heads.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        device: torch.device,
        group: dist.ProcessGroup | None = None,
        cp_method: ContextMethod | None = None,
    ) -> None:
        self.group = group if group is not None and group.size() > 1 else None
        cp, rank = (self.group.size(), self.group.rank()) if self.group is not None else (1, 0)
        self.context = ContextIndex(split_context(lengths, cp), rank, device)
        self.cp_method = cp_method
        self.longest = max(lengths)

    @property
    def local_tokens(self) -> int:
        """L: tokens of this rank's model, padding included."""
        return self.context.split.local_tokens

    @cached_property
    def positions(self) -> Int64[Tensor, " L"]:
        """Position of each of this rank's tokens in its document."""
        return torch.from_numpy(self.context.part.positions).to(self.context.device)

    def select(self, values: Float[Tensor, "T ..."]) -> Float[Tensor, "L ..."]:
        """This rank's part of per-token values of the batch; 0 for padding tokens."""
        return select_local(values, self.context)

    def gather(self, values: Float[Tensor, "L ..."]) -> Float[Tensor, "T ..."]:
        """Every rank's values in the batch's order; see ``gather_packed`` for the backward pass."""
        return gather_packed(values, self.context, self.group)


@contextmanager
def attending_to(pack: DocumentPack) -> Iterator[None]:
    """Context of forward passes on ``pack`` and of their backward passes."""
    global _current
    before, _current = _current, pack
    try:
        yield
    finally:
        _current = before


def current_pack() -> DocumentPack:
    """The pack of the innermost ``attending_to``."""
    assert _current is not None, "attention outside of attending_to"
    return _current
