"""Reads blocks of arrays from files and casts elements, with numpy alone.

Types have the names of safetensors. numpy has no bfloat16: such elements are stored as bits in uint16, fp8 in uint8.
"""

from __future__ import annotations

import ctypes
import os
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
# Rows of at least this many bytes are read one by one; shorter ones together with the bytes between them.
_OWN_READ = 4096
_SLAB_BYTES = 8 << 20
CAST_ELEMENTS = 1 << 20  # per step, to bound the size of the float32 intermediate


@dataclass(frozen=True)
class FileArray:
    """An array in a file from byte ``start`` on, in row-major order."""

    path: Path
    start: int
    dtype: str
    shape: tuple[int, ...]

    def read(self, box: Box) -> Array:
        """A block of the array."""
        out = np.empty(box.shape, NUMPY[self.dtype])
        self.read_into(out, box)
        return out

    def read_into(self, out: Array, box: Box) -> None:
        """Reads the block into ``out``, of the box's shape, without casting."""
        shape, bounds = list(self.shape), list(zip(box.start, box.stop, strict=True))
        whole = 0  # trailing dimensions that the box covers completely are one run of bytes
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
        """Reads slabs of whole rows and selects the block's columns."""
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
        view = memoryview(direct).cast("B") if direct.size else memoryview(b"")
        handle, done = _open(self.path).number, 0
        while done < len(view):
            read = os.preadv(handle, [view[done:]], at + done)
            if not read:
                raise UserError(
                    f"is truncated, {len(view) - done} bytes are missing",
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


class _Handle:
    def __init__(self, path: Path) -> None:
        self.number = -1
        self.number = os.open(path, os.O_RDONLY)

    def __del__(self) -> None:
        with suppress(OSError):
            os.close(self.number)


def close_files() -> None:
    """Closes cached files, whose names may refer to other files now."""
    _open.cache_clear()


def reuse_memory() -> None:
    """Makes the C library keep the memory of freed arrays: new pages from the kernel for each block would cost more
    than the copy into them. No effect without glibc."""
    with suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        for option in (-3, -1):  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD
            library.mallopt(option, 1 << 30)


def cast(values: Array, source: str, target: str, what: str = "") -> Array:
    """Casts elements, rounding to nearest with ties to even, like torch.

    Raises UserError, naming ``what``, if a finite number exceeds the range of float16.
    """
    if source == target:
        return values
    out = np.empty(values.shape, NUMPY[target])
    flat, result = values.reshape(-1), out.reshape(-1)
    for at in range(0, flat.size, CAST_ELEMENTS):
        inside = slice(at, at + CAST_ELEMENTS)
        result[inside] = _from_float32(to_float32(flat[inside], source), target, what)
    return out


def to_float32(values: Array, dtype: str) -> Array:
    """Casts to float32, which represents the numbers of every type exactly."""
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
                "contains numbers beyond the range of float16", where=what, remedy="convert to bfloat16 or float32"
            )
        return halves
    return values


@lru_cache(maxsize=1)
def _fp8_numbers() -> Array:
    """The 256 numbers of float8_e4m3fn: 1 sign, 4 exponent (bias 7) and 3 mantissa bits; all ones is NaN."""
    bits = np.arange(256)
    exponent, mantissa = (bits >> 3) & 15, bits & 7
    size = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    numbers = np.where(bits >> 7, -size, size).astype(np.float32)
    numbers[[0x7F, 0xFF]] = np.nan
    return numbers
