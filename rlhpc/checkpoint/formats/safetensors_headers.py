"""Headers and index of the safetensors files of a HuggingFace folder: places of tensors, checked against the files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from rlhpc.core.errors import UserError
from rlhpc.core.inputs import COPY_AGAIN, MIB, is_file_name, open_input, parse_json, read_json_object

_MOST_HEADER = 100_000_000  # bytes, the format's own bound
_MOST_DIMENSIONS = 16
# Bits per element of every type of the format.
_BITS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
    **{"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6},
}

# Bytes per element of the readable types.
ITEM_BYTES = {"F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1}
DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}  # from torch's names
FILE_BYTES = 5 * 10**9  # of one file, HuggingFace's default
INDEX = "model.safetensors.index.json"
_MOST_INDEX = 256 * MIB  # DeepSeek-V3's has 8 MB


@dataclass(frozen=True)
class TensorEntry:
    """A tensor in the data: from byte ``first`` to ``last``."""

    dtype: str
    shape: tuple[int, ...]
    first: int
    last: int


def read_header(path: Path) -> tuple[int, dict[str, TensorEntry]]:
    """Start of the data in one safetensors file, and its tensors by name; the file must have exactly the length in the
    header, and each byte of the data belong to one tensor. Raises UserError.

    Format: 8 bytes header length (little endian), the header as JSON, the data.
    """
    size = path.stat().st_size
    with open_input(path) as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > _MOST_HEADER:
            raise _no_safetensors(path)
        text = file.read(length)
    if len(text) < length:
        raise UserError(
            f"is truncated inside its header, {length - len(text)} bytes are missing",
            where=str(path),
            remedy=COPY_AGAIN,
        )
    try:
        header = parse_json(text, str(path))
    except UserError:
        raise _no_safetensors(path) from None
    if not isinstance(header, dict):
        raise _no_safetensors(path)
    header.pop("__metadata__", None)
    entries = {name: _entry(value, path) for name, value in header.items()}
    end = 8 + length + max((entry.last for entry in entries.values()), default=0)
    if size != end:
        wrong = f"is truncated, {end - size} bytes are missing" if size < end else f"is {size - end} bytes too long"
        raise UserError(f"{wrong} ({size} of {end} bytes)", where=str(path), remedy=COPY_AGAIN)
    _check_places(entries, path)
    return 8 + length, entries


def _entry(value: Any, path: Path) -> TensorEntry:
    if isinstance(value, dict):
        dtype, shape, places = (value.get(key) for key in ("dtype", "shape", "data_offsets"))
        if isinstance(dtype, str) and _are_counts(shape) and _are_counts(places) and len(shape) <= _MOST_DIMENSIONS:
            entry = TensorEntry(dtype, tuple(shape), *places) if len(places) == 2 else None
            if entry is not None and entry.first <= entry.last:
                return entry
    raise _no_safetensors(path)


def _are_counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 2**63 for item in value)


def _check_places(entries: dict[str, TensorEntry], path: Path) -> None:
    """Refuses tensors that overlap or leave gaps, and those of another size than shape and type need, as the format
    does."""
    at = 0
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].first, item[1].last)):
        if entry.first != at:
            raise UserError(
                f"{name!r} begins at byte {entry.first} of the data instead of {at}", where=str(path), remedy=COPY_AGAIN
            )
        if entry.dtype not in _BITS:
            raise UserError(f"{name!r} has the unknown type {entry.dtype[:40]!r}", where=str(path), remedy=COPY_AGAIN)
        if (entry.last - entry.first) * 8 != prod(entry.shape) * _BITS[entry.dtype]:
            raise UserError(
                f"{name!r} has {entry.last - entry.first} bytes for shape {list(entry.shape)} of {entry.dtype}",
                where=str(path),
                remedy=COPY_AGAIN,
            )
        at = entry.last


def _no_safetensors(path: Path) -> UserError:
    return UserError("is not a safetensors file", where=str(path), remedy=COPY_AGAIN)


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


def weight_files(folder: Path) -> list[Path]:
    """Safetensors files of the folder, from its index if it has one."""
    index = folder / INDEX
    if not index.is_file():
        single = folder / "model.safetensors"
        if not single.is_file():
            raise UserError(
                f"no model.safetensors and no {INDEX}",
                where=str(folder),
                remedy="save the model with save_pretrained (safetensors)",
            )
        return [single]
    paths = sorted({folder / name for name in read_weight_map(index).values()})
    absent = [path.name for path in paths if not path.is_file()]
    if absent:
        raise UserError(
            f"lists {len(paths)} files, of which {len(absent)} are missing: {', '.join(absent[:3])}"
            + (" …" if len(absent) > 3 else ""),
            where=str(index),
            remedy="copy or download the missing files",
        )
    return paths


def stray_files(folder: Path) -> list[Path]:
    """Files that programs may take for weights of the model, and that ``weight_files`` does not name."""
    return sorted({*folder.glob("model*.safetensors")} - {*weight_files(folder)})


def check_weight_map(folder: Path, files: Mapping[str, Path]) -> None:
    """Checks that the folder's index, if it has one, names the file of each tensor in ``files``. Raises UserError."""
    index = folder / INDEX
    if not index.is_file():
        return
    listed = read_weight_map(index)
    for tensor in sorted(listed.keys() | files.keys()):
        name, file = listed.get(tensor), files.get(tensor)
        if file is None:
            wrong = f"lists {tensor!r}, which no file has"
        elif name is None:
            wrong = f"does not list {tensor!r}, which is in {file.name}"
        elif folder / name != file:
            wrong = f"lists {tensor!r} in {name}, but it is in {file.name}"
        else:
            continue
        raise UserError(wrong, where=str(index), remedy=COPY_AGAIN)


def read_weight_map(index: Path) -> dict[str, str]:
    """Map from tensors to files in an index. Raises UserError, also for a file that is not in the model's folder."""
    weight_map = read_json_object(index, _MOST_INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError("has no weight_map", where=str(index), remedy=COPY_AGAIN)
    for tensor, name in weight_map.items():
        if not is_file_name(name):
            raise UserError(
                f"{tensor!r} is outside the model's folder, in {repr(name)[:80]}",
                where=str(index),
                remedy=COPY_AGAIN,
            )
    return dict(weight_map)


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
