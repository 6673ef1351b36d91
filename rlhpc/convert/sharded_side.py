"""Contents of a checkpoint of the FSDP2 back end, from its index and its table of weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from rlhpc.checkpoint.formats.torch_dist import tiles
from rlhpc.checkpoint.formats.torch_dist_metadata import SavedTensor, read_index
from rlhpc.checkpoint.formats.weight_table import TableWeight, check_table, read_table
from rlhpc.sharding.shards import Box, TensorSpec


@dataclass(frozen=True)
class ShardedSide:
    """A checkpoint of the FSDP2 back end. ``weights``: HuggingFace's tensors by name, as blocks of ``tensors``."""

    folder: Path
    fields: Mapping[str, Any]
    model_folder: Path
    tensors: Mapping[str, SavedTensor]
    weights: Mapping[str, TableWeight]
    kind = "fsdp"

    @cached_property
    def specs(self) -> dict[str, TensorSpec]:
        return {name: weight.tensor for name, weight in self.weights.items()}

    @property
    def home(self) -> Path:
        return self.folder

    @property
    def architecture(self) -> str:
        return str(next(iter(self.fields.get("architectures") or ()), "model"))

    @property
    def num_layers(self) -> int:
        return 1 + max((spec.layer for spec in self.specs.values() if spec.layer is not None), default=-1)

    @property
    def parameters(self) -> set[str]:
        """Keys of the weights in the checkpoint."""
        return {piece.parameter for weight in self.weights.values() for piece in weight.pieces}

    def dtype_of(self, name: str) -> str:
        """Type of the model's tensor, to which the float32 master weights are cast."""
        return self.weights[name].dtype

    @property
    def files(self) -> list[Path]:
        return sorted({self.folder / chunk.file for tensor in self.tensors.values() for chunk in tensor.chunks})

    def coverage_faults(self) -> Iterator[str]:
        """Parameters of which an element is in no tensor, or in several."""
        blocks: dict[str, list[Box]] = {}
        for weight in self.weights.values():
            for piece in weight.pieces:
                blocks.setdefault(piece.parameter, []).append(piece.source)
        for name, boxes in blocks.items():
            if not tiles(self.tensors[name].shape, boxes):
                yield f"{name}: not every element is in exactly one tensor"


def read_sharded(folder: Path, fields: Mapping[str, Any], model_folder: Path) -> ShardedSide:
    """The checkpoint in ``folder``, whose config and tokenizer are in ``model_folder``. Raises UserError."""
    index, table = read_index(folder), read_table(folder)
    check_table(table, index.tensors, folder)
    weights = {weight.tensor.name: weight for weight in table}
    return ShardedSide(folder, fields, model_folder, index.tensors, weights)
