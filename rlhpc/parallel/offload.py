"""Offload of gradients, optimizer state and weights from the training device to CPU memory between phases.

Whole storages are moved and emptied in place, so that every view of a back end's buffers stays valid. On a CPU the same
code moves the same bytes.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, UntypedStorage

from rlhpc.config.training import OffloadSection
from rlhpc.parallel import pinned_memory

Kind = Literal["gradients", "optimizer", "parameters"]
KINDS: tuple[Kind, ...] = ("gradients", "optimizer", "parameters")


@dataclass
class _Part:
    """A storage and, while it is offloaded, its size and its bytes in CPU memory (None: discarded)."""

    kind: Kind
    storage: UntypedStorage
    away: int = 0  # bytes while it is offloaded
    copy: Tensor | None = None

    @property
    def size(self) -> int:
        return self.away or self.storage.nbytes()


class Offloader:
    """Moves at least ``fraction`` of the bytes of ``kinds`` to the CPU and back, in the order of KINDS.

    ``find`` returns the current tensors of a kind on the device. Gradients are restored as zeros. ``settle`` waits for
    what is still written to them.
    """

    def __init__(
        self,
        kinds: Sequence[Kind],
        fraction: float,
        find: Callable[[Kind], Iterable[Tensor]],
        settle: Callable[[], None] = lambda: None,
    ) -> None:
        self._settle = settle
        self._kinds, self._fraction, self._find = [kind for kind in KINDS if kind in kinds], fraction, find
        self._away: dict[int, _Part] = {}
        self._spare: dict[int, list[Tensor]] = {}  # pinned memory by size, because allocating it is slow

    @torch.no_grad()
    def release(self, *kinds: Kind) -> None:
        """Offloads these kinds, as far as configured."""
        self._settle()
        parts = [part for part in self._selected() if part.kind in kinds and not part.away]
        for part in parts:
            if part.kind != "gradients":
                part.copy = self._buffer(part.storage)
                part.copy.copy_(_bytes(part.storage), non_blocking=True)
        _wait(parts)
        for part in parts:
            part.away = part.storage.nbytes()
            part.storage.resize_(0)
            self._away[_key(part.storage)] = part
        if parts and parts[0].storage.device.type == "cuda":
            torch.cuda.empty_cache()  # the engine allocates from the driver, not from PyTorch's cache

    @torch.no_grad()
    def restore(self, *kinds: Kind, settled: bool = True) -> None:
        """Restores what is offloaded of these kinds. ``settled`` false: without waiting for what is written to them."""
        if settled:
            self._settle()
        parts = [part for part in self._away.values() if part.kind in kinds]
        for part in parts:
            part.storage.resize_(part.away)
            content = _bytes(part.storage)
            if part.copy is None:
                content.zero_()
            else:
                content.copy_(part.copy, non_blocking=True)
        _wait(parts)
        for part in parts:
            del self._away[_key(part.storage)]
            self._reuse(part.copy)

    def drop(self, kind: Kind) -> None:
        """Discards what is offloaded of a kind whose tensors no longer exist."""
        for key, part in list(self._away.items()):
            if part.kind == kind:
                del self._away[key]
                self._reuse(part.copy)

    def _selected(self) -> list[_Part]:
        """Enough whole storages for the fraction, gradients first; each under the first kind that contains it."""
        found: dict[int, _Part] = {}
        for kind in ("parameters", "gradients", "optimizer"):  # float32 weights are their own master weights
            for tensor in self._find(kind):
                storage = tensor.untyped_storage()
                key = _key(storage)
                found.setdefault(key, self._away.get(key) or _Part(kind, storage))
        parts = [part for kind in self._kinds for part in found.values() if part.kind == kind and part.size]
        wanted, held, selected = self._fraction * sum(part.size for part in parts), 0, []
        for part in parts:
            if held >= wanted:
                break
            selected.append(part)
            held += part.size
        return selected

    def _reuse(self, buffer: Tensor | None) -> None:
        if buffer is not None:
            self._spare.setdefault(buffer.numel(), []).append(buffer)

    def _buffer(self, storage: UntypedStorage) -> Tensor:
        size = storage.nbytes()
        spare = self._spare.get(size)
        if spare:
            return spare.pop()
        return pinned_memory.allocate(size, storage.device)


def configured_kinds(section: OffloadSection, *, trained: bool) -> list[Kind]:
    """Kinds that the configuration offloads; of a frozen model its weights."""
    if not trained:
        return ["parameters"] if section.parameters else []
    return [kind for kind in KINDS if getattr(section, kind)]


def _key(storage: UntypedStorage) -> int:
    return int(storage._cdata)  # identity of the storage; Python's wrappers are not unique


def _bytes(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _wait(parts: Sequence[_Part]) -> None:
    if parts and parts[0].storage.device.type == "cuda":
        torch.cuda.current_stream().synchronize()


def release_cached() -> None:
    """Returns it to the driver, for allocators other than PyTorch's. No effect on a CPU.

    Frees tensors in reference cycles first: their memory would stay in use.
    """
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()
