"""Small functions of tensors that torch.compile turns into single kernels, where it can."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Literal

import torch

Compile = Literal["auto", "functions", "blocks", "none"]
_log = logging.getLogger(__name__)
_enabled = False


def choose_compilation(choice: Compile) -> None:
    """Decides for this process whether functions are compiled; auto: with a GPU. Before their first call."""
    global _enabled
    _enabled = choice in ("functions", "blocks") or (choice == "auto" and torch.cuda.is_available())


def compiles() -> bool:
    """True if functions are compiled in this process."""
    return _enabled


class CompiledFunction:
    """A function whose tensors may have any number of rows. Where it cannot be compiled, it runs as it is written."""

    def __init__(self, function: Callable[..., Any], name: str = "") -> None:
        self._function, self._failed = function, False
        self._compiled: Callable[..., Any] | None = None
        self.__name__, self.__doc__ = name or function.__name__, function.__doc__

    @property
    def compiles(self) -> bool:
        """True if the next call is compiled, as far as is known."""
        return _enabled and not self._failed

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.compiles:
            return self._function(*args, **kwargs)
        try:
            return self._ready()(*args, **kwargs)
        except torch._dynamo.exc.TorchDynamoException as error:
            # Of compilation alone, before anything has run: a lack of memory, say, is no reason to run on uncompiled,
            # and a function that changes its inputs must not run twice.
            self._failed = True
            _log.warning("%s runs uncompiled: %s", self.__name__, str(error).partition("\n")[0])
            return self._function(*args, **kwargs)

    def _ready(self) -> Callable[..., Any]:
        if self._compiled is None:
            self._compiled = torch.compile(self._function, dynamic=True, fullgraph=True)
        return self._compiled


def compiled(function: Callable[..., Any]) -> CompiledFunction:
    """Decorator: a pure function of tensors, without views of its inputs among its outputs."""
    return CompiledFunction(function)
