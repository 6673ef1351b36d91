"""Operations that a host would wait for on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock


@contextmanager
def host_reads() -> Iterator[list[str]]:
    """Names of reads within it: values of tensors, and sizes that depend on values."""
    import torch

    from bench.operators import OperatorCount

    reads: list[str] = []
    inside: list[str] = []

    def counted(name: str) -> Any:
        real = getattr(torch.Tensor, name)

        def read(*args: Any, **kwargs: Any) -> Any:
            if inside:  # a mode of torch functions calls what it finds by this name
                return real(*args, **kwargs)
            reads.append(name)
            inside.append(name)
            try:
                return real(*args, **kwargs)
            finally:
                inside.pop()

        return read

    with ExitStack() as stack:
        for name in ("tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__index__", "__float__"):
            stack.enter_context(mock.patch.object(torch.Tensor, name, counted(name)))
        with OperatorCount() as count:
            yield reads
        reads += [name for name in count.syncs.elements() if name != "_local_scalar_dense"]
