"""Offload of activations that wait for their backward pass to CPU memory.

Used for the inputs of recomputed layers. Each is copied on a stream of its own while the next layers compute, and
copied back while the layers after it are recomputed: at most two are on the device at once. On a CPU the same code
copies the same bytes. Hooks for saved tensors see these inputs and nothing else of recomputed layers, both with
Megatron's CheckpointFunction (tensor_parallel/random.py) and with torch.utils.checkpoint without reentrance.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from rlhpc.parallel import pinned_memory

_KEY = "actor.memory.offload_activations"
_REMEDY = "set it to false, use smaller microbatches (train.tokens_per_microbatch), or raise slurm.memory"


class _Kept:
    """Stand-in that autograd holds for a tensor: a copy of it in ``buffer``, which has as many bytes or more."""

    def __init__(self, tensor: Tensor, buffer: Tensor, release: Callable[[_Kept], None]) -> None:
        self.buffer = buffer
        self.copy = buffer[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        self.tensor: Tensor | None = tensor  # until it is copied, and again from the start of the copy back
        self.copied: Any = None  # event after the last copy, unless the computing stream has waited for it
        self.before: weakref.ref[_Kept] | None = None  # kept before it in the same forward pass
        self._release = release

    def __del__(self) -> None:
        self._release(self)


class ActivationOffload:
    """Offload of one model's activations: tensors that autograd saves within ``saving``, or between ``begin`` and
    ``end``. Leaves and views of them stay, because others hold them: weights, and what a pipeline stage has received.

    ``held``: bytes of the copies; ``most``: their maximum so far.
    """

    def __init__(self, device: torch.device) -> None:
        self.held = self.most = 0
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._hooks: saved_tensors_hooks | None = None  # those in effect
        self._last: weakref.ref[_Kept] | None = None  # the latest, whose tensor is still on the device
        self._before: weakref.ref[_Kept] | None = None  # the latest of this forward pass
        self._free: list[Tensor] = []  # pinned memory, because allocating it is slow

    def begin(self) -> None:
        """Begins a forward pass, whose backward pass copies nothing back of passes before it."""
        self._before = None
        self._enter()

    def end(self) -> None:
        """Ends what ``begin`` began, unless it has ended."""
        if self._hooks is not None:
            self._hooks.__exit__()
            self._hooks = None

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Context in which autograd saves activations here."""
        self._enter()
        try:
            yield
        finally:
            self.end()

    def _enter(self) -> None:
        assert self._hooks is None, "one forward pass inside of another"
        self._hooks = saved_tensors_hooks(self._pack, self._unpack)
        self._hooks.__enter__()

    @torch.no_grad()
    def _pack(self, tensor: Tensor) -> Tensor | _Kept:
        base = tensor if tensor._base is None else tensor._base
        if base.is_leaf or not tensor.is_contiguous():
            return tensor
        self._let_go()
        kept = _Kept(tensor.detach(), self._take(tensor.nbytes), self._release)
        self._copy(kept, kept.copy, tensor.detach())
        kept.before, self._last = self._before, weakref.ref(kept)
        self._before = self._last
        self.held += kept.copy.nbytes
        self.most = max(self.most, self.held)
        return kept

    @torch.no_grad()
    def _unpack(self, kept: Tensor | _Kept) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        if self._last is None or self._last() is not kept:
            self._let_go()
        self._bring_back(kept)
        self._await(kept)
        tensor, kept.tensor = kept.tensor, None
        before = kept.before() if kept.before is not None else None
        if before is not None:
            self._bring_back(before)
        assert tensor is not None
        return tensor

    def _let_go(self) -> None:
        """Frees the latest activation on the device, once it is copied."""
        last = self._last() if self._last is not None else None
        if last is not None:
            self._await(last)
            last.tensor = None
        self._last = None

    def _bring_back(self, kept: _Kept) -> None:
        """Starts the copy back to the device, unless it is there or on its way."""
        if kept.tensor is None:
            kept.tensor = torch.empty_like(kept.copy, device=self._device, pin_memory=False)
            self._copy(kept, kept.tensor, kept.copy)

    def _copy(self, kept: _Kept, target: Tensor, source: Tensor) -> None:
        """Copies after all that the computing stream has been given so far. Copies run in order, so that a buffer is
        written only when the copy back from it is complete."""
        if self._stream is None:
            target.copy_(source)
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        kept.copied = self._stream.record_event()

    def _await(self, kept: _Kept) -> None:
        """Lets the computing stream wait for the last copy: of memory that it frees or reads from now on."""
        if self._stream is not None and kept.copied is not None:
            torch.cuda.current_stream(self._device).wait_event(kept.copied)
            kept.copied = None

    def _take(self, nbytes: int) -> Tensor:
        """The smallest free buffer that suffices; else a new one, in place of the largest free one."""
        self._free.sort(key=Tensor.numel)
        for place, buffer in enumerate(self._free):
            if buffer.numel() >= nbytes:
                return self._free.pop(place)
        if self._free:
            if self._stream is not None:
                self._stream.synchronize()  # memory must not be freed under a copy
            self._free.pop()
        return pinned_memory.allocate(nbytes, self._device, _KEY, _REMEDY)

    def _release(self, kept: _Kept) -> None:
        """Takes back the buffer of an activation that autograd no longer holds."""
        self._await(kept)
        self.held -= kept.copy.nbytes
        self._free.append(kept.buffer)
