"""Places of tensors in the safetensors files of a HuggingFace folder, from their headers alone."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path

from rlhpc.checkpoint.formats.header import TensorEntry, read_header
from rlhpc.checkpoint.formats.model_folder import check_weight_map, weight_files
from rlhpc.core.errors import UserError

# Bytes per element of the readable types.
ITEM_BYTES = {"F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1}
DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}  # from torch's names
FILE_BYTES = 5 * 10**9  # of one file, HuggingFace's default
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in ``file`` from byte ``start`` on, in row-major order."""

    name: str
    dtype: str  # as safetensors names it
    shape: tuple[int, ...]
    file: Path
    start: int

    @property
    def size(self) -> int:
        return prod(self.shape) * ITEM_BYTES[self.dtype]


def read_folder(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of the folder; raises UserError if a file is incomplete, a tensor occurs twice, or the index names
    another file for it."""
    found: dict[str, StoredTensor] = {}
    for path in weight_files(folder):
        begin, header = read_header(path)
        for name, entry in header.items():
            if name in found:
                raise UserError(f"contains {name!r}, as does {found[name].file.name}", where=str(path))
            found[name] = _stored(name, entry, path, begin)
    check_weight_map(folder, {name: tensor.file for name, tensor in found.items()})
    return found


def _stored(name: str, entry: TensorEntry, path: Path, begin: int) -> StoredTensor:
    if entry.dtype not in ITEM_BYTES:
        raise UserError(
            f"{name!r} is {entry.dtype}", where=str(path), remedy=f"convert it to one of {', '.join(ITEM_BYTES)} first"
        )
    return StoredTensor(name, entry.dtype, entry.shape, path, begin + entry.first)


@dataclass(frozen=True)
class NewFile:
    """A safetensors file to be written: its header and its tensors."""

    name: str
    header: bytes
    tensors: tuple[tuple[str, str, tuple[int, ...], int], ...]  # name, dtype, shape, start in the file
    size: int


def plan_files(tensors: Iterable[tuple[str, str, tuple[int, ...]]], max_bytes: int) -> list[NewFile]:
    """Files for (name, dtype, shape) in order, with HuggingFace's names; at most ``max_bytes`` each unless for a single
    tensor."""
    groups: list[list[tuple[str, str, tuple[int, ...]]]] = []
    held: list[tuple[str, str, tuple[int, ...]]] = []
    used = 0
    for name, dtype, shape in tensors:  # as huggingface_hub.split_torch_state_dict_into_shards, for transformers
        size = prod(shape) * ITEM_BYTES[dtype]
        if size > max_bytes:
            groups.append([(name, dtype, shape)])
            continue
        if used + size > max_bytes:
            groups.append(held)
            held, used = [], 0
        held.append((name, dtype, shape))
        used += size
    if held:
        groups.append(held)
    count = len(groups)
    return [
        _new_file("model.safetensors" if count == 1 else f"model-{i:05d}-of-{count:05d}.safetensors", group)
        for i, group in enumerate(groups, 1)
    ]


def _new_file(name: str, tensors: list[tuple[str, str, tuple[int, ...]]]) -> NewFile:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at, starts = 0, []
    # Sorted by size of element, as by the format's own writer, so that each tensor is aligned to it.
    ordered = sorted(tensors, key=lambda entry: -ITEM_BYTES[entry[1]])
    for tensor, dtype, shape in ordered:
        size = prod(shape) * ITEM_BYTES[dtype]
        header[tensor] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + size]}
        starts.append(at)
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    begin = 8 + len(text)
    placed = tuple((t, d, s, begin + start) for (t, d, s), start in zip(ordered, starts, strict=True))
    return NewFile(name, len(text).to_bytes(8, "little") + text, placed, begin + at)


def index_text(files: Iterable[NewFile]) -> str:
    """Index of sharded files, in HuggingFace's format."""
    files = list(files)
    total = sum(file.size - len(file.header) for file in files)
    parameters = sum(prod(shape) for file in files for _, _, shape, _ in file.tensors)
    where = {name: file.name for file in files for name, _, _, _ in file.tensors}
    metadata = {"total_parameters": parameters, "total_size": total}
    return json.dumps({"metadata": metadata, "weight_map": dict(sorted(where.items()))}, indent=2) + "\n"
