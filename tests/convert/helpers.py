"""Conversions of tiny models, and whether two folders hold the same tensors."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rlhpc.checkpoint.formats.safetensors_headers import DTYPES
from rlhpc.checkpoint.formats.torch_dist_metadata import Index, SavedTensor
from rlhpc.convert.execute import convert
from rlhpc.convert.plan import ConversionPlan, plan_conversion, plan_layout
from rlhpc.convert.progress import Progress
from rlhpc.convert.sides import read_side
from tests.helpers.plain_model import write_model

PIECE_BYTES = 200_000  # several files of a tiny model


def write_random_model(folder: Path, **changes: Any) -> Path:
    """``write_model`` with random numbers, which are the same each time."""
    source = write_model(folder, **changes)
    weights = source / "model.safetensors"
    header = 8 + int.from_bytes(weights.read_bytes()[:8], "little")
    size = weights.stat().st_size - header
    numbers = np.random.default_rng(0).standard_normal(size // 4, np.float32)
    weights.write_bytes(weights.read_bytes()[:header] + numbers.tobytes())
    return source


class Notes(Progress):
    """``Progress`` that keeps the remarks, and calls ``at_start`` before the first file."""

    def __init__(self, at_start: Callable[[], None] = lambda: None) -> None:
        self.texts: list[str] = []
        self._at_start = at_start

    def update(self, done: int, total: int) -> None:
        if not done:
            self._at_start()

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


class Code:
    """Value that makes a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._folder),)


def archive(value: Any) -> bytes:
    """File of torch.save."""
    import io

    import torch

    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def index_bytes(tensors: Mapping[str, SavedTensor], objects: Mapping[str, tuple[str, int, int]]) -> bytes:
    """Contents of .metadata."""
    from rlhpc.parallel.checkpoint_io import torch_metadata

    return pickle.dumps(torch_metadata(Index(dict(tensors), dict(objects))))
