"""Counts the operators that code starts on a device, and the bytes of their operands."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_ALLOCATIONS = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
_OVERWRITES = ("copy_", "zero_", "fill_", "_foreach_zero_", "_foreach_copy_")  # do not read what they change
_SYNCS = ("_local_scalar_dense", "nonzero", "masked_select", "item", "equal", "is_nonzero")


class OperatorCount(TorchDispatchMode):
    """Operators, and bytes that each of them reads and writes, in the code that runs within it.

    Views and allocations are no operators. A tensor counts as often as operators name it, without broadcast copies.
    What ``torch.compile`` returns within ``counted_compilation`` is one operator, with its inputs and outputs.
    """

    _current: OperatorCount | None = None  # the one that counts: a function stays compiled when the next one does

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.bytes, self.syncs = Counter[str](), Counter[str](), Counter[str]()
        self._inside = False

    def clear(self) -> None:
        """Forgets what was counted."""
        for counts in (self.calls, self.bytes, self.syncs):
            counts.clear()

    def __enter__(self) -> OperatorCount:
        OperatorCount._current = self
        return super().__enter__()

    def __exit__(self, *args: Any) -> None:
        super().__exit__(*args)
        OperatorCount._current = None

    @property
    def total(self) -> tuple[int, int]:
        """(operators, bytes)"""
        return self.calls.total(), self.bytes.total()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if _waits(func, name, args):
            self.syncs[name] += 1
        if not self._inside:
            self._count(func, name, (args, kwargs), result)
        return result

    def _count(self, func: Any, name: str, given: Any, result: Any) -> None:
        inputs, outputs = _tensors(given), _tensors(result)
        changes = func._schema.is_mutable
        if name in _ALLOCATIONS or (not outputs and not changes):
            return
        known = {tensor.untyped_storage()._cdata for tensor in inputs}
        if not changes and all(tensor.untyped_storage()._cdata in known for tensor in outputs):
            return  # views
        if changes and not outputs:  # _foreach functions return nothing
            outputs = inputs
        read = inputs[1:] if name == "copy_" else [] if name in _OVERWRITES else inputs
        self.add(name, [*read, *outputs])

    def add(self, name: str, operands: list[Tensor]) -> None:
        """Counts an operator with its operands."""
        self.calls[name] += 1
        self.bytes[name] += sum(map(size_of, operands))

    @staticmethod
    def region(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function`` as one operator. A tensor that it changes is read and written."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            count = OperatorCount._current
            if count is None or count._inside:
                return function(*args, **kwargs)
            given = _tensors((args, kwargs))
            versions = [tensor._version for tensor in given]
            count._inside = True
            try:
                result = function(*args, **kwargs)
            finally:
                count._inside = False
            changed = [tensor for tensor, version in zip(given, versions, strict=True) if tensor._version != version]
            count.add(name, [*given, *changed, *_tensors(result)])
            return result

        return call

    @contextmanager
    def counted_compilation(self) -> Iterator[None]:
        """Functions that are given to ``torch.compile`` within it are one operator each, and run uncompiled."""
        compile = torch.compile

        def replaced(function: Callable[..., Any] | None = None, **_: Any) -> Any:
            return self.region(f"compiled {function.__name__}", function) if function is not None else replaced

        torch.compile = replaced  # type: ignore[assignment]
        try:
            yield
        finally:
            torch.compile = compile


def size_of(tensor: Tensor) -> int:
    """Bytes of a tensor's elements in memory: dims of stride 0 count once."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.element_size() * functools.reduce(lambda product, one: product * (one[0] if one[1] else 1), sizes, 1)


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _waits(func: Any, name: str, args: Any) -> bool:
    """True if the host would wait for a GPU: a value or a size that depends on values."""
    if name in _SYNCS:
        return True
    mask = name in ("index", "index_put", "index_put_", "_unsafe_index", "_index_put_impl_")
    return mask and any(tensor.dtype in (torch.bool, torch.uint8) for tensor in _tensors(args[1]))
