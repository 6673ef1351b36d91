"""What the installed transformers has, from its sources: importing it would import torch."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from pathlib import Path

# Of version 5 and of older ones.
_MAPPINGS = ("models/auto/auto_mappings.py", "models/auto/configuration_auto.py")


@cache
def has_model_type(model_type: str) -> bool | None:
    """Whether transformers has configurations of this type; None if it is not installed."""
    spec = find_spec("transformers")
    if spec is None or spec.origin is None:
        return None
    files = [file for name in _MAPPINGS if (file := Path(spec.origin).parent / name).is_file()]
    return any(f'("{model_type}", "' in file.read_text(encoding="utf-8") for file in files)
