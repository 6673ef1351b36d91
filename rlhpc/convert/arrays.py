"""Blocks of arrays in files, and elements from one type to another, by numpy alone.

Types have the names of safetensors. numpy has no bfloat16: such elements are their bits, in uint16; fp8 in uint8.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path

import numpy as np

from rlhpc.checkpoint.formats.torch_dist import cut_box
from rlhpc.core.errors import UserError
from rlhpc.sharding.shards import Box

Array = np.ndarray

NUMPY = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2"), "F8_E4M3": np.dtype("u1")}
# Rows of at least so many bytes are read by themselves; shorter ones together with what lies between them.
_OWN_READ = 4096
_SLAB_BYTES = 8 << 20
CAST_ELEMENTS = 1 << 20  # at once, so that the float32 in between stays small


@dataclass(frozen=True)
class FileArray:
    """An array in the bytes of a file from ``start`` on, row after row."""

    path: Path
    start: int
    dtype: str
    shape: tuple[int, ...]

    def read(self, box: Box) -> Array:
        """A block of it."""
        out = np.empty(box.shape, NUMPY[self.dtype])
        self.read_into(out, box)
        return out

    def read_into(self, out: Array, box: Box) -> None:
        """Fill ``out``, of the box's shape, with the block; elements are not changed."""
        shape, bounds = list(self.shape), list(zip(box.start, box.stop, strict=True))
        whole = 0  # last dimensions that are taken as a whole are one run of bytes
        while whole < len(shape) and bounds[-1 - whole] == (0, shape[-1 - whole]):
            whole += 1
        split = max(0, len(shape) - whole - 1)
        run = prod(b - a for a, b in bounds[split:])
        item = NUMPY[self.dtype].itemsize
        if run * item >= _OWN_READ or split == 0:
            for index in np.ndindex(*(b - a for a, b in bounds[:split])):
                at = tuple(i + a for i, (a, _) in zip(index, bounds, strict=False))
                first = _flat((*at, *(a for a, _ in bounds[split:])), shape)
                self._pread(out[index], self.start + first * item)
            return
        self._read_short_rows(out, box, split)

    def _read_short_rows(self, out: Array, box: Box, split: int) -> None:
        """By slabs of whole rows, of which the block's columns are kept."""
        row = self.shape[split:]
        each = max(1, _SLAB_BYTES // (prod(row) * NUMPY[self.dtype].itemsize))
        columns = tuple(slice(a, b) for a, b in zip(box.start[split:], box.stop[split:], strict=True))
        lead = Box(box.start[:split], box.stop[:split])
        for part in cut_box(Box((*lead.start, 0), (*lead.stop, 1)), each):
            rows = Box(part.start[:-1] + (0,) * len(row), part.stop[:-1] + row)
            inside = tuple(slice(a - c, b - c) for a, b, c in zip(part.start, part.stop, lead.start, strict=False))
            out[inside] = self.read(rows)[(..., *columns)]

    def _pread(self, out: Array, at: int) -> None:
        direct = out if out.flags.c_contiguous else np.empty(out.shape, out.dtype)
        view, handle = memoryview(direct).cast("B") if direct.size else memoryview(b""), _descriptor(self.path)
        done = 0
        while done < len(view):
            read = os.preadv(handle, [view[done:]], at + done)
            if not read:
                raise UserError(
                    f"is cut short, {len(view) - done} bytes are missing",
                    where=str(self.path),
                    remedy="copy the file again",
                )
            done += read
        if direct is not out:
            out[...] = direct


def _flat(index: tuple[int, ...], shape: list[int]) -> int:
    flat = 0
    for i, n in zip(index, shape, strict=True):
        flat = flat * n + i
    return flat


@lru_cache(maxsize=64)
def _open(path: Path) -> _Handle:
    return _Handle(path)


def _descriptor(path: Path) -> int:
    return _open(path).number


class _Handle:
    def __init__(self, path: Path) -> None:
        self.number = os.open(path, os.O_RDONLY)

    def __del__(self) -> None:
        with suppress(OSError):
            os.close(self.number)


def close_files() -> None:
    """Forget open files: what is under their names now may be another."""
    _open.cache_clear()


def reuse_memory() -> None:
    """Let the C library keep the memory of arrays that are gone: new pages from the kernel for each block would cost
    more than the copy into them. Where there is no glibc nothing happens."""
    with suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        for option in (-3, -1):  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD
            library.mallopt(option, 1 << 30)


def cast(values: Array, source: str, target: str, what: str = "") -> Array:
    """The elements in another type, rounded to the nearest, halves to even, as torch does.

    Raises UserError, naming ``what``, where a finite number does not fit into float16.
    """
    if source == target:
        return values
    out = np.empty(values.shape, NUMPY[target])
    flat, result = values.reshape(-1), out.reshape(-1)
    for at in range(0, flat.size, CAST_ELEMENTS):
        part = slice(at, at + CAST_ELEMENTS)
        result[part] = _from_float32(to_float32(flat[part], source), target, what)
    return out


def to_float32(values: Array, dtype: str) -> Array:
    """Every type's numbers are float32 numbers too."""
    if dtype == "BF16":
        return (values.astype(np.uint32) << 16).view(np.float32)
    if dtype == "F8_E4M3":
        return _fp8_numbers()[values]
    return values.astype(np.float32, copy=False)


def _from_float32(values: Array, target: str, what: str) -> Array:
    if target == "BF16":
        bits = np.ascontiguousarray(values).view(np.uint32)
        rounded = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
        return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)
    if target == "F16":
        with np.errstate(over="ignore"):
            halves = values.astype(np.float16)
        if np.any(np.isinf(halves) & np.isfinite(values)):
            raise UserError(
                "has numbers beyond the range of float16", where=what, remedy="convert to bfloat16 or float32"
            )
        return halves
    return values


@lru_cache(maxsize=1)
def _fp8_numbers() -> Array:
    """The 256 numbers of float8_e4m3fn: 1 sign, 4 exponent (bias 7) and 3 mantissa bits; all ones is no number."""
    bits = np.arange(256)
    exponent, mantissa = (bits >> 3) & 15, bits & 7
    size = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    numbers = np.where(bits >> 7, -size, size).astype(np.float32)
    numbers[[0x7F, 0xFF]] = np.nan
    return numbers


def slabs(shape: tuple[int, ...], most_elements: int) -> Iterator[Box]:
    """A whole array in boxes of few elements."""
    yield from cut_box(Box((0,) * len(shape), shape), most_elements)
