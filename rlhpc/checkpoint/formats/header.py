"""Reads the header of a safetensors file into typed entries, and checks it against the file's length."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from rlhpc.core.errors import UserError
from rlhpc.core.inputs import COPY_AGAIN, open_input, parse_json

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
