"""Classes of vLLM's Transformers back end that are compiled, apart from transformers' own; installed by ``compat``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

_NOTED = "_classes_to_compile"


def note(model: Any, cls: type, **options: Any) -> None:
    """Notes that instances of ``cls`` in vLLM's ``model`` are to be compiled, with options of support_torch_compile."""
    model.__dict__.setdefault(_NOTED, {})[cls] = options


def replacing_classes(then: Callable[[Any], None]) -> Callable[[Any], None]:
    """``then``, after modules of vLLM's model of a noted class have become instances of a subclass that is compiled."""

    @functools.wraps(then)
    def replace(model: Any) -> None:
        classes = {cls: _compiled(cls, options) for cls, options in model.__dict__.pop(_NOTED, {}).items()}
        for module in model.model.modules():
            if (compiled := classes.get(type(module))) is not None:
                module.__class__ = compiled
                compiled.__init__(module, vllm_config=model.vllm_config)
        then(model)

    return replace


def _compiled(cls: type, options: dict[str, Any]) -> Any:
    """A subclass whose initialization adds what vLLM needs, to a module that is already built."""
    from vllm.compilation.decorators import support_torch_compile

    own = type(cls.__name__, (cls,), {"__init__": lambda module: None, "__module__": cls.__module__})
    return support_torch_compile(**options)(own)
