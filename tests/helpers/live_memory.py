"""Bytes of live tensors, on any device: on "meta", of models of any size."""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.helpers.parts import key_of


class LiveStorages(TorchDispatchMode):
    """Most bytes of storages at once that operators use within it, by their present sizes: FSDP2 frees gathered
    weights in place."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._known: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves((args, kwargs, result)):
            if type(tensor) is torch.Tensor:
                storage = tensor.untyped_storage()
                self._known[key_of(storage)] = StorageWeakRef(storage)
        self.peak = max(self.peak, sum(map(self._size, list(self._known))))
        return result

    def _size(self, key: int) -> int:
        reference = self._known[key]
        storage = None if reference.expired() else torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
        if storage is None:
            del self._known[key]
            return 0
        return int(storage.nbytes())


class LiveMemory(TorchDispatchMode):
    """Storages that operators allocate within it. ``left_out``: size of those that do not count."""

    def __init__(self, left_out: int = 0) -> None:
        super().__init__()
        self.peak, self._left_out = 0, left_out
        self._known: dict[int, tuple[StorageWeakRef | None, int]] = {}

    @property
    def bytes(self) -> int:
        """Bytes of storages that still exist."""
        self._known = {key: (ref, size) for key, (ref, size) in self._known.items() if ref is None or not ref.expired()}
        return sum(size for ref, size in self._known.values() if ref is not None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, torch.Tensor):  # existed before
                self._known.setdefault(key_of(tensor.untyped_storage()), (None, 0))
        result = func(*args, **(kwargs or {}))
        added = False
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                known = self._known.get(key_of(storage))
                if known is None or (known[0] is not None and known[0].expired()):
                    size = storage.nbytes()
                    self._known[key_of(storage)] = (StorageWeakRef(storage), 0 if size == self._left_out else size)
                    added = True
        if added:
            self.peak = max(self.peak, self.bytes)
        return result
