"""Reads the index (.metadata) of a torch_dist checkpoint without torch and without running code from it.

It is a pickle of torch.distributed.checkpoint.metadata.Metadata: the classes of that format are read as plain records,
and any other name in the file is refused.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhpc.checkpoint.formats.megatron_folder import checkpoint_folder, has_index
from rlhpc.checkpoint.formats.torch_archive import DISTRUST, Inert, listed
from rlhpc.checkpoint.formats.torch_dist import CheckpointParameter, checkpoint_parameters, found_form, tiles
from rlhpc.core.errors import UserError, did_you_mean
from rlhpc.core.storage import patiently
from rlhpc.models import ModelShape
from rlhpc.sharding.shards import Box

# torch's element types by their names in safetensors.
TORCH_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F8_E4M3": "float8_e4m3fn"}
_DTYPES = {torch: name for name, torch in TORCH_DTYPES.items()}
_TYPES = {*_DTYPES, "float64", "float8_e5m2", "int64", "int32", "int16", "int8", "uint8", "bool"}
_COPY_AGAIN = "copy or save the checkpoint again"
HEAD = "output_layer.weight"
COMMON = "common.pt"  # values that are equal on all ranks
TABLE = "weights.json"  # only in checkpoints of the FSDP2 back end (weight_table.py)


@dataclass(frozen=True)
class Chunk:
    """``box`` of a tensor, saved by torch.save in bytes ``start`` to ``start + length`` of ``file``."""

    box: Box
    file: str
    start: int
    length: int


@dataclass(frozen=True)
class SavedTensor:
    key: str
    dtype: str  # name in safetensors; torch's name for types that no weight has
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class Index:
    """``objects``: place (file, start, length) of each value that is not a tensor."""

    tensors: dict[str, SavedTensor]
    objects: dict[str, tuple[str, int, int]]

    def files(self, folder: Path) -> set[Path]:
        """Files of the tensors."""
        return {folder / chunk.file for tensor in self.tensors.values() for chunk in tensor.chunks}


def read_index(folder: Path) -> Index:
    """Contents of a checkpoint, by key. Raises UserError if a file with tensors is shorter than the index requires."""
    index = parse_index(folder)
    _check(folder, index.tensors)
    return index


def parse_index(folder: Path) -> Index:
    """Contents of a checkpoint, by key, from its index alone. Raises UserError."""
    path = folder / ".metadata"
    if not path.is_file():
        raise UserError("no .metadata: not a checkpoint", where=str(folder))
    data = patiently(path.read_bytes, path)
    try:
        document = _Reader(io.BytesIO(data)).load()
        places = {
            (index.fqn, tuple(index.offset)): info for index, info in document.storage_data.items() if index.offset
        }
        scalars = {index.fqn: info for index, info in document.storage_data.items() if not index.offset}
        tensors = {
            key: _tensor(key, entry, places, scalars)
            for key, entry in document.state_dict_metadata.items()
            if isinstance(entry, _Tensor)
        }
        objects = {_text(key): _place(key, info) for key, info in scalars.items() if key not in tensors}
    except UserError as error:
        raise UserError(error.message, where=str(path), remedy=error.remedy or _COPY_AGAIN) from None
    except Exception as error:  # a damaged pickle fails in any way
        raise UserError(f"is damaged ({type(error).__name__})", where=str(path), remedy=_COPY_AGAIN) from None
    return Index(tensors, objects)


def is_torch_dist(folder: Path) -> bool:
    """True if the folder is, or has in it, a checkpoint in Megatron's torch_dist format."""
    found = checkpoint_folder(folder)
    return has_index(found) and not (found / TABLE).is_file()


def saved_parameters(
    tensors: Mapping[str, SavedTensor], shape: ModelShape, folder: Path, model: Path
) -> list[CheckpointParameter]:
    """Parameters of the model of the config in ``model`` as the checkpoint in ``folder`` has them, with its rows of the
    vocabulary. Raises UserError if they are missing or differ."""
    form = found_form(shape, tensors.keys(), folder)
    return [
        _as_saved(parameter, tensors, folder, model)
        for parameter in checkpoint_parameters(shape, form=form)
        if not _lacks_value_head(parameter, tensors, shape)
    ]


def _lacks_value_head(parameter: CheckpointParameter, tensors: Mapping[str, SavedTensor], shape: ModelShape) -> bool:
    """True if the parameter is a value head and the checkpoint is of a model with another head, or none."""
    if shape.head != "value" or parameter.key != HEAD:
        return False
    return parameter.key not in tensors or tensors[parameter.key].shape != parameter.shape


def _as_saved(
    parameter: CheckpointParameter, tensors: Mapping[str, SavedTensor], folder: Path, model: Path
) -> CheckpointParameter:
    saved = tensors.get(parameter.key)
    if saved is None:
        weights = [key for key in tensors if not key.startswith("optimizer.")]
        raise UserError(
            f"the checkpoint has no {parameter.key!r}, which {model / 'config.json'} requires",
            where=str(folder),
            remedy=did_you_mean(parameter.key, weights),
        )
    found, wanted = saved.shape, parameter.global_shape
    if found != wanted and not (parameter.pads and found[1:] == wanted[1:] and found[0] > wanted[0]):
        raise UserError(
            f"{parameter.key!r} has shape {list(found)}, config.json requires {list(wanted)}",
            where=str(folder / ".metadata"),
            remedy=f"use the config.json that belongs to these weights, not {model / 'config.json'}",
        )
    return parameter.with_rows(found[0]) if parameter.pads else parameter


def _tensor(key: str, entry: Any, places: Mapping[Any, Any], scalars: Mapping[str, Any]) -> SavedTensor:
    chunks = []
    for chunk in entry.chunks:
        start, size = _counts(chunk.offsets), _counts(chunk.sizes)
        info = places[key, start] if start else scalars[key]
        if getattr(info, "transform_descriptors", None):
            raise UserError(f"{key!r} is packed with {info.transform_descriptors}, which is not supported")
        if 0 in size:  # of a rank that has none of the tensor's rows
            continue
        stop = tuple(a + n for a, n in zip(start, size, strict=True))
        chunks.append(Chunk(Box(start, stop), *_place(key, info)))
    return SavedTensor(_text(key), _text(entry.properties.dtype), _counts(entry.size), tuple(chunks))


def _counts(value: Any) -> tuple[int, ...]:
    """Sizes or offsets. Raises TypeError for anything else, to which a flipped bit of the pickle may refer."""
    if not all(type(number) is int for number in value):
        raise TypeError
    return tuple(value)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


def _place(key: str, info: Any) -> tuple[str, int, int]:
    """File, start and length of a value; the file must be inside the checkpoint."""
    name = Path(_text(info.relative_path))
    if name.is_absolute() or ".." in name.parts:
        raise UserError(f"{key!r} is outside the checkpoint, in {str(name)!r}")
    start, length = int(info.offset), int(info.length)
    if start < 0 or length < 0:
        raise UserError(f"{key!r} is at byte {start} of {str(name)!r}, with {length} bytes")
    return str(name), start, length


def _check(folder: Path, tensors: Mapping[str, SavedTensor]) -> None:
    ends: dict[str, int] = {}
    for tensor in tensors.values():
        if tensor.shape and not tiles(tensor.shape, [chunk.box for chunk in tensor.chunks]):
            raise UserError(
                f"the chunks of {tensor.key!r} do not contain each element exactly once",
                where=str(folder / ".metadata"),
                remedy=_COPY_AGAIN,
            )
        for chunk in tensor.chunks:
            ends[chunk.file] = max(ends.get(chunk.file, 0), chunk.start + chunk.length)
    for name, end in sorted(ends.items()):
        if not (folder / name).is_file():
            raise UserError("missing", where=str(folder / name), remedy=_COPY_AGAIN)
        size = (folder / name).stat().st_size
        if size < end:
            raise UserError(
                f"is truncated, {end - size} bytes are missing ({size} of {end} bytes)",
                where=str(folder / name),
                remedy=_COPY_AGAIN,
            )


class _Record:
    """Instance of a class of the format: its fields, from positional arguments or a state."""

    names: tuple[str, ...] = ()

    def __init__(self, *values: Any, **fields: Any) -> None:
        self.__dict__.update(zip(self.names, values, strict=False), **fields)

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state if isinstance(state, dict) else zip(self.names, state, strict=False))


def _record(*names: str) -> type[_Record]:
    return type("_Fields", (_Record,), {"names": names})


_Tensor = _record("properties", "size", "chunks")
_Metadata = _record("state_dict_metadata", "planner_data", "storage_data", "storage_meta", "version")
_METADATA, _PLANNER = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.planner"
_MEGATRON = "megatron.core.dist_checkpointing.strategies.torch"
_KNOWN: dict[tuple[str, str], Any] = {
    (_METADATA, "Metadata"): _Metadata,
    # Of megatron-core before 0.16, with one field more each.
    (_MEGATRON, "MCoreMetadata"): _Metadata,
    (_MEGATRON, "MCoreSavePlan"): Inert,
    (_METADATA, "TensorStorageMetadata"): _Tensor,
    (_METADATA, "TensorProperties"): _record("dtype", "layout", "requires_grad", "memory_format", "pin_memory"),
    (_METADATA, "ChunkStorageMetadata"): _record("offsets", "sizes"),
    (_METADATA, "BytesStorageMetadata"): Inert,
    (_METADATA, "MetadataIndex"): type("_Index", (_Record,), {"names": ("fqn", "offset", "index"), "offset": None}),
    (_METADATA, "StorageMeta"): Inert,
    (_METADATA, "_MEM_FORMAT_ENCODING"): Inert,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _record("relative_path", "offset", "length"),
    ("torch.distributed.checkpoint.filesystem", "_StoragePrefix"): Inert,
    ("torch", "Size"): lambda sizes=(): tuple(sizes),
    # The path that the checkpoint was saved at.
    ("pathlib", "PosixPath"): Inert,
    ("pathlib._local", "PosixPath"): Inert,
    ("torch.serialization", "_get_layout"): lambda name: name,
    ("collections", "OrderedDict"): dict,
    **{(_PLANNER, name): Inert for name in ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData")},
}


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in _TYPES:
            return _DTYPES.get(name, name)
        try:
            return listed(_KNOWN, module, name, "the format")
        except UserError as error:
            raise UserError(error.message, remedy=DISTRUST) from None
