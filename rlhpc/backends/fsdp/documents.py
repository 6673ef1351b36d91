"""The documents of the packed batch that a model computes on, beside its inputs.

Attention needs their bounds. Some architectures of transformers do not pass keyword arguments on to it, and
recomputation calls it in the backward pass, in another thread on a GPU. The pack is therefore a value of the process,
or of a thread where several threads compute:

    pack = DocumentPack(lengths, device, group)
    with attending_to(pack):
        logits = model(input_ids=pack.select(tokens)[None], position_ids=pack.positions[None], use_cache=False).logits
        loss(logits).backward()
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from rlhpc.backends.kernels.exchanges import ContextIndex, gather_packed, select_local
from rlhpc.sharding.context_split import split_context
from rlhpc.sharding.layout import ContextMethod

_packs: dict[int, DocumentPack] = {}  # by thread


class DocumentPack:
    """Documents of a packed batch of T tokens, of which this rank holds L.

    ``group``: the ranks that share the documents (context parallelism); ``cp_method``: their exchange, by default the
    one that suits the heads. ``recompute``: the backward pass computes attention again from queries, keys and values.
    ``keeps``: attention of compiled layers keeps what a backward pass needs.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        device: torch.device,
        group: dist.ProcessGroup | None = None,
        cp_method: ContextMethod | None = None,
        *,
        recompute: bool = False,
        keeps: bool = False,
    ) -> None:
        self.group = group if group is not None and group.size() > 1 else None
        cp, rank = (self.group.size(), self.group.rank()) if self.group is not None else (1, 0)
        self.context = ContextIndex(split_context(lengths, cp), rank, device)
        self.cp_method, self.recompute, self.keeps = cp_method, recompute, keeps
        self._kept: dict[int, Any] = {}
        self._numbers = itertools.count()
        self.longest = max(lengths)

    @property
    def local_tokens(self) -> int:
        """L: tokens of this rank's model, padding included."""
        return self.context.split.local_tokens

    @cached_property
    def positions(self) -> Int64[Tensor, " L"]:
        """Position of each of this rank's tokens in its document."""
        return torch.from_numpy(self.context.part.positions).to(self.context.device, non_blocking=True)

    def places(self, selected: Bool[Tensor, " T"]) -> Int64[Tensor, " N"]:
        """Places of those of this rank's tokens that are ``selected``, a mask in CPU memory of the batch's."""
        mask, packed = selected.cpu().numpy(), self.context.part.packed
        mine = mask if self.context.split.is_trivial else mask[np.maximum(packed, 0)] & (packed >= 0)
        return torch.from_numpy(mine.nonzero()[0]).to(self.context.device, non_blocking=True)

    def keep(self, value: Any) -> int:
        """Keeps a value until ``take``; returns its number."""
        number = next(self._numbers)
        self._kept[number] = value
        return number

    def take(self, number: int) -> Any:
        """The value kept under a number, once; None without one."""
        return self._kept.pop(number, None)

    def select(self, values: Float[Tensor, "T ..."]) -> Float[Tensor, "L ..."]:
        """This rank's part of per-token values of the batch; 0 for padding tokens."""
        return select_local(values, self.context)

    def gather(self, values: Float[Tensor, "L ..."]) -> Float[Tensor, "T ..."]:
        """Every rank's values in the batch's order; see ``gather_packed`` for the backward pass."""
        return gather_packed(values, self.context, self.group)


@contextmanager
def attending_to(pack: DocumentPack) -> Iterator[None]:
    """Context of forward passes on ``pack`` and of their backward passes."""
    thread = threading.get_ident()
    before, _packs[thread] = _packs.get(thread), pack
    try:
        yield
    finally:
        if before is None:
            del _packs[thread]
        else:
            _packs[thread] = before


def current_pack() -> DocumentPack:
    """The pack of the innermost ``attending_to``: of this thread, or, in a thread of autograd, of the only one."""
    if (own := _packs.get(threading.get_ident())) is not None:
        return own
    assert _packs, "attention outside of attending_to"
    assert len(_packs) == 1, "attention of an unknown thread"
    return next(iter(_packs.values()))
