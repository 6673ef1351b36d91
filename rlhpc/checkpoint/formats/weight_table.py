"""Table of the blocks of a sharded checkpoint's parameters that form each tensor of a HuggingFace folder.

The FSDP2 back end saves parameters as transformers has them in memory, where experts are stacked. It writes the table
beside them, so that ``rlhpc convert`` finds HuggingFace's tensors without transformers and torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhpc.checkpoint.formats.torch_dist import tiles
from rlhpc.checkpoint.formats.torch_dist_metadata import TABLE, TORCH_DTYPES, SavedTensor, is_torch_dist
from rlhpc.core.errors import UserError
from rlhpc.core.inputs import MIB, read_json_object
from rlhpc.sharding.placement import Backend
from rlhpc.sharding.shards import Box, TensorSpec

_FORMAT = 1
_MOST_BYTES = 256 * MIB
_COPY_AGAIN = "copy or save the checkpoint again"
_CONVERT: dict[Backend, str] = {"megatron": "megatron-to-hf", "fsdp": "fsdp-to-hf"}


@dataclass(frozen=True)
class TablePiece:
    """``box`` of a tensor, which begins at ``start`` in a parameter with possibly more, leading dimensions."""

    box: Box
    parameter: str
    start: tuple[int, ...]

    @property
    def source(self) -> Box:
        """The block of the parameter."""
        return self.of(self.box)

    def of(self, box: Box) -> Box:
        """The block of the parameter that a block inside ``box`` is."""
        lead = len(self.start) - len(box.start)
        ahead = [a - b for a, b in zip(box.start, self.box.start, strict=True)]
        start = (*self.start[:lead], *(a + b for a, b in zip(self.start[lead:], ahead, strict=True)))
        sizes = (1,) * lead + box.shape
        return Box(start, tuple(a + n for a, n in zip(start, sizes, strict=True)))


@dataclass(frozen=True)
class TableWeight:
    """A tensor with HuggingFace's name. ``dtype``: that of the model, by its name in safetensors; the checkpoint has
    float32 master weights."""

    tensor: TensorSpec
    dtype: str
    pieces: tuple[TablePiece, ...]


def is_sharded(folder: Path) -> bool:
    """True if the folder is a checkpoint of the FSDP2 back end."""
    return (folder / TABLE).is_file() and (folder / ".metadata").is_file()


def backend_of_checkpoint(folder: Path) -> Backend | None:
    """The back end that saved the checkpoint in a folder; None for a folder that is none. Megatron's may be in a folder
    of it, as Megatron-LM has it."""
    if is_sharded(folder):
        return "fsdp"
    return "megatron" if is_torch_dist(folder) else None


def refuse_other_backend(folder: Path, backend: Backend) -> None:
    """Refuses the other back end's checkpoints. Raises UserError."""
    saved = backend_of_checkpoint(folder)
    if saved is not None and saved != backend:
        raise UserError(
            f"is a checkpoint of train.backend {saved}, which {backend} cannot load",
            where=str(folder),
            remedy=f"convert it with `rlhpc convert {_CONVERT[saved]}`, and load the HuggingFace folder",
        )


def table_text(weights: Iterable[TableWeight]) -> str:
    """Contents of the file."""
    entries = [
        {
            "name": weight.tensor.name,
            "shape": weight.tensor.shape,
            "layer": weight.tensor.layer,
            "expert": weight.tensor.expert,
            "float32": weight.tensor.float32,
            "dtype": weight.dtype,
            "pieces": [[p.box.start, p.box.stop, p.parameter, p.start] for p in weight.pieces],
        }
        for weight in weights
    ]
    return json.dumps({"format": _FORMAT, "weights": entries})


def read_table(folder: Path) -> list[TableWeight]:
    """The tensors in the order of the HuggingFace folder. Raises UserError."""
    document = read_json_object(folder / TABLE, _MOST_BYTES)
    if document.get("format") != _FORMAT:
        raise UserError(
            f"has format {document.get('format')!r}, not {_FORMAT}",
            where=str(folder / TABLE),
            remedy="use the version of rlhpc that saved the checkpoint",
        )
    try:
        return [_weight(entry) for entry in document["weights"]]
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"is damaged ({type(error).__name__})", where=str(folder / TABLE), remedy=_COPY_AGAIN) from None


def check_table(weights: Iterable[TableWeight], tensors: Mapping[str, SavedTensor], folder: Path) -> None:
    """Checks that each tensor consists of blocks that the checkpoint has, each element once. Raises UserError."""
    for weight in weights:
        fault = next(_faults(weight, tensors), None)
        if fault:
            raise UserError(f"{weight.tensor.name!r} {fault}", where=str(folder / TABLE), remedy=_COPY_AGAIN)


def _faults(weight: TableWeight, tensors: Mapping[str, SavedTensor]) -> Iterator[str]:
    if not tiles(weight.tensor.shape, [piece.box for piece in weight.pieces]):
        yield "does not consist of its pieces"
    if weight.dtype not in TORCH_DTYPES:
        yield f"has dtype {weight.dtype!r}"
    for piece in weight.pieces:
        saved = tensors.get(piece.parameter)
        if saved is None:
            yield f"is in {piece.parameter!r}, which the checkpoint has not"
        elif saved.dtype not in TORCH_DTYPES or not _is_inside(piece.source, saved.shape):
            yield f"is not in {piece.parameter!r} of shape {list(saved.shape)}"


def _is_inside(box: Box, shape: tuple[int, ...]) -> bool:
    return len(box.start) == len(shape) and box.meet(Box((0,) * len(shape), shape)) == box


def _weight(entry: Mapping[str, Any]) -> TableWeight:
    layer, expert = (None if entry[key] is None else int(entry[key]) for key in ("layer", "expert"))
    spec = TensorSpec(str(entry["name"]), _numbers(entry["shape"]), layer, expert, bool(entry["float32"]))
    pieces = [
        TablePiece(Box(_numbers(start), _numbers(stop)), str(parameter), _numbers(at))
        for start, stop, parameter, at in entry["pieces"]
    ]
    for piece in pieces:
        if not len(spec.shape) == len(piece.box.start) == len(piece.box.stop) <= len(piece.start):
            raise ValueError(spec.name)
    return TableWeight(spec, str(entry["dtype"]), tuple(pieces))


def _numbers(values: Any) -> tuple[int, ...]:
    if not all(type(value) is int and value >= 0 for value in values):
        raise ValueError(values)
    return tuple(values)
