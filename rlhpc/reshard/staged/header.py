"""What precedes each message where messages may be deltas (``reshard.delta``)."""

from __future__ import annotations

from dataclasses import astuple, dataclass

import torch
from torch import Tensor

from rlhpc.core.errors import ReshardError
from rlhpc.reshard.staged.delta import Form

NO_BASE = -1  # stated by an engine's rank that has received no version over this connection
GOOD, AGAIN = 0, 1  # its answers to a message: it has the right bytes, or needs them in full


@dataclass(frozen=True)
class Header:
    """``size``: bytes that follow, of which ``gaps`` are a delta's gaps; ``changed``: its elements; ``base``,
    ``result``: checksums of the bytes that a delta is applied to, and of the message's bytes."""

    form: Form
    size: int
    gaps: int
    changed: int
    base: int
    result: int

    @staticmethod
    def empty() -> Tensor:
        """Place for a header."""
        return torch.zeros(6, dtype=torch.int64)

    def encoded(self) -> Tensor:
        """As it is sent."""
        return torch.tensor([int(value) for value in astuple(self)], dtype=torch.int64)

    @classmethod
    def decoded(cls, data: Tensor, full: int) -> Header:
        """The header of a message whose weights are of ``full`` bytes. Raises a ReshardError if it cannot be one."""
        form, *numbers = data.tolist()
        found = cls(Form(form), *numbers) if form in list(Form) else None
        whole = found is not None and found.form is Form.full
        if found is None or not (found.size == full if whole else 0 <= found.size < full):
            raise ReshardError(f"a message of {full} bytes of weights has the header {data.tolist()}")
        return found


HEADER_BYTES = Header.empty().numel() * 8
