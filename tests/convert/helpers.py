"""Conversions of tiny models, and whether two folders hold the same tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rlhpc.checkpoint.formats.safetensors_headers import DTYPES
from rlhpc.convert.execute import convert
from rlhpc.convert.plan import ConversionPlan, plan_conversion, plan_layout
from rlhpc.convert.sides import read_side

PIECE_BYTES = 200_000  # several pieces of a tiny model


class Notes:
    """``Progress`` that keeps the remarks, and calls ``at_start`` before the first piece."""

    def __init__(self, at_start: Callable[[], None] = lambda: None) -> None:
        self.texts: list[str] = []
        self._at_start = at_start

    def update(self, done: int, total: int) -> None:
        if not done:
            self._at_start()

    def spent(self, parts: Mapping[str, float]) -> None:
        pass

    def note(self, text: str) -> None:
        self.texts.append(text)


def plan(
    source: Path, target: str, step: int | None = None, model: Path | None = None, **options: Any
) -> ConversionPlan:
    """``options``: axes of the layout, dtype, file_bytes, piece_bytes."""
    side = read_side(source, step, model)
    sizes = {name: options.pop(name) for name in ("piece_bytes", "file_bytes") if name in options}
    dtype = DTYPES[options.pop("dtype")] if "dtype" in options else None
    return plan_conversion(side, target, plan_layout(side, options), dtype, **{"piece_bytes": PIECE_BYTES, **sizes})


def to_megatron(source: Path, target: Path, **options: Any) -> Path:
    """From either format."""
    convert(plan(source, "megatron", **options), target, workers=1, force=True)
    return target


def to_huggingface(source: Path, target: Path, **options: Any) -> Path:
    convert(plan(source, "hf", **options), target, workers=1, force=True)
    return target


def tensors_of(folder: Path) -> dict[str, Any]:
    """All tensors of a HuggingFace folder, read by the safetensors package."""
    from safetensors.torch import load_file

    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def differing(first: Path, second: Path) -> list[str]:
    """Names of the tensors in which two HuggingFace folders differ, by presence, type or any bit."""
    import torch

    one, two = tensors_of(first), tensors_of(second)
    found = sorted(one.keys() ^ two.keys())
    for name in one.keys() & two.keys():
        a, b = one[name], two[name]
        if a.dtype != b.dtype or a.shape != b.shape or not torch.equal(a.view(torch.uint8), b.view(torch.uint8)):
            found.append(name)
    return found
