"""Names the phases and layers of a profiled step, in traces of torch.profiler and for Nsight Systems."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

PREFIX = "rlhpc:"


class Ranges:
    """Nested ranges of one thread. ``nvtx``: as NVTX ranges too. None of its calls raises: hooks run within the model;
    ``error`` is the first failure, after which there are no ranges."""

    def __init__(self, *, nvtx: bool) -> None:
        self._nvtx = nvtx
        self._open: list[Any] = []
        self._hooks: list[Any] = []
        self.error = ""

    def enter(self, name: str) -> None:
        """Begins a range."""
        if self.error:
            return
        try:
            span = torch.profiler.record_function(PREFIX + name)
            span.__enter__()
            self._open.append(span)
            if self._nvtx:
                torch.cuda.nvtx.range_push(PREFIX + name)
        except Exception as error:
            self.error = f"{type(error).__name__}: {error}"

    def leave(self) -> None:
        """Ends the newest range."""
        if not self._open:
            return
        try:
            self._open.pop().__exit__(None, None, None)
            if self._nvtx and not self.error:
                torch.cuda.nvtx.range_pop()
        except Exception as error:
            self.error = f"{type(error).__name__}: {error}"

    def attach(self, layers: Iterable[tuple[str, torch.nn.Module]]) -> None:
        """Makes a range of each forward pass of a layer, until ``detach``. Results stay the same."""
        for name, layer in layers:
            self._hooks.append(layer.register_forward_pre_hook(lambda *_, name=name: self.enter(name)))
            self._hooks.append(layer.register_forward_hook(lambda *_: self.leave(), always_call=True))

    def detach(self) -> None:
        """Removes the ranges of layers, and ends those that are open."""
        hooks, self._hooks = self._hooks, []
        for hook in hooks:
            hook.remove()
        while self._open:
            self.leave()
