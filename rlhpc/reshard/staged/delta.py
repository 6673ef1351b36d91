"""Changes between two versions of a message's bytes, and the header of such a message. numpy on one core.

Both versions are read as elements of 16 bits, so that an element of bfloat16 is one, and one of float32 two. A delta is

    gaps      unchanged elements before each changed one, a byte each; 255: another byte follows
    contents  plain: the new elements; compressed: new minus old, as integers of 16 bits

Compressed deltas have each part compressed by zlib. Checksums of both versions show whether a delta belongs to the
bytes that it is applied to, and whether the result is right.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from enum import IntEnum

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlhpc.core.errors import ReshardError

Data = NDArray[np.uint8]
ELEMENT = 2  # bytes
_CHUNK = 1 << 17  # elements at a time: what they need stays in a core's cache
_MORE = 255
_LEVEL = 1
_ROW = 1 << 15  # words that a checksum adds up at a time, with the same weights
_INPUT = 1 << 16  # compressed bytes at a time
NO_BASE = -1  # stated by an engine's rank that has received no version over this connection
GOOD, AGAIN = 0, 1  # its answers to a message: it has the right bytes, or needs them in full


class Form(IntEnum):
    """Form in which a message's bytes are sent; the value is the one on the wire."""

    full = 0
    plain = 1
    compressed = 2


@dataclass(frozen=True)
class Delta:
    """``gaps``: bytes of ``payload`` that are gaps; ``changed``: number of changed elements."""

    form: Form
    gaps: int
    changed: int
    payload: Data


def checksum(data: Data) -> int:
    """Checksum of bytes, of 64 bits with a sign. A change of one element always changes it, any other almost always."""
    words, step = -(-len(data) // 8), 8 * _ROW
    sums = np.empty(-(-words // _ROW), np.uint64)
    for row in range(len(sums)):
        part = data[row * step : (row + 1) * step]
        if len(part) < step or part.ctypes.data % 8:
            part = np.concatenate([part, np.zeros(step - len(part), np.uint8)])
        sums[row] = np.dot(part.view(np.uint64), _WEIGHTS)
    total = np.dot(sums, _odd_numbers(_ROW, len(sums)))
    return int(np.uint64(total).astype(np.int64))


def encode(new: Data, old: Data, form: Form) -> Delta | None:
    """The delta that makes ``new`` of ``old``; None unless it is smaller than ``new``. Both have the same even size."""
    assert len(new) == len(old), "two versions of a message differ in size"
    gaps, contents = (_Part(compressed=form is Form.compressed) for _ in range(2))
    changed, last = 0, -1
    new_elements, old_elements = new.view(np.uint16), old.view(np.uint16)
    for start in range(0, len(new_elements), _CHUNK):
        fresh, base = new_elements[start : start + _CHUNK], old_elements[start : start + _CHUNK]
        where = np.flatnonzero(fresh != base)
        if not len(where):
            continue
        gaps.add(_gap_bytes(np.diff(where, prepend=last - start) - 1))
        values = fresh[where]
        contents.add((values - base[where] if form is Form.compressed else values).view(np.uint8))
        changed, last = changed + len(where), start + int(where[-1])
        if gaps.size + contents.size >= len(new):
            return None
    if not changed:
        return Delta(form, 0, 0, np.empty(0, np.uint8))
    parts = gaps.end(), contents.end()
    payload = np.frombuffer(bytearray().join((*parts[0], *parts[1])), np.uint8)
    return Delta(form, sum(map(len, parts[0])), changed, payload) if len(payload) < len(new) else None


def apply(delta: Delta, data: Data) -> None:
    """Makes the new version of the old one, in place. Raises a ReshardError if the delta is malformed; the data is then
    undefined."""
    gaps, contents = delta.payload[: delta.gaps], delta.payload[delta.gaps :]
    if delta.form is Form.full or not 0 <= delta.gaps <= len(delta.payload) or delta.changed < 0:
        raise _malformed("its header")
    if not delta.changed:
        if len(delta.payload):
            raise _malformed("bytes that are of no element")
        return
    elements, values = data.view(np.uint16), _reader(contents, delta.form)
    last, left = -1, delta.changed
    for found in _reader(gaps, delta.form).chunks(_CHUNK):
        steps = np.cumsum(found + (found != _MORE), dtype=np.int64)
        where = (last + steps)[found != _MORE]
        last += int(steps[-1])
        left -= len(where)
        if last >= len(elements) or left < 0:
            raise _malformed("more elements than the message")
        fresh = values.take(ELEMENT * len(where)).view(np.uint16)
        elements[where] = elements[where] + fresh if delta.form is Form.compressed else fresh
    if left or not values.ended:
        raise _malformed("another number of elements")


class _Part:
    """Bytes of one part of a delta, in pieces."""

    def __init__(self, *, compressed: bool) -> None:
        self._compressor = zlib.compressobj(_LEVEL) if compressed else None
        self._pieces: list[bytes | memoryview] = []
        self.size = 0

    def add(self, data: Data) -> None:
        """Appends bytes."""
        self._append(self._compressor.compress(data.data) if self._compressor is not None else data.data)

    def end(self) -> list[bytes | memoryview]:
        """All bytes."""
        if self._compressor is not None:
            self._append(self._compressor.flush())
        return self._pieces

    def _append(self, piece: bytes | memoryview) -> None:
        self._pieces.append(piece)
        self.size += len(piece)


class _Plain:
    """Reads a part as it is."""

    def __init__(self, data: Data) -> None:
        self._data, self._at = data, 0

    def take(self, size: int) -> Data:
        """The next ``size`` bytes. Raises a ReshardError if there are fewer."""
        found = self._data[self._at : self._at + size]
        if len(found) < size:
            raise _malformed("fewer elements")
        self._at += size
        return found

    def chunks(self, size: int) -> Iterator[Data]:
        """All bytes, up to ``size`` at a time."""
        while not self.ended:
            yield self.take(min(size, len(self._data) - self._at))

    @property
    def ended(self) -> bool:
        return self._at == len(self._data)


class _Compressed:
    """Reads a compressed part, with memory for what is requested alone."""

    def __init__(self, data: Data) -> None:
        self._decompressor, self._pieces, self._rest = zlib.decompressobj(), _Plain(data).chunks(_INPUT), b""

    def take(self, size: int) -> Data:
        """See ``_Plain``."""
        found = self._next(size)
        if len(found) < size:
            raise _malformed("fewer elements")
        return np.frombuffer(found, np.uint8)

    def chunks(self, size: int) -> Iterator[Data]:
        """See ``_Plain``."""
        while found := self._next(size):
            yield np.frombuffer(found, np.uint8)
        if not self.ended:
            raise _malformed("a part that does not end")

    @property
    def ended(self) -> bool:
        """True if this is the end of the part, and of its bytes."""
        more = self._next(1) or self._decompressor.unused_data or next(self._pieces, None) is not None
        return self._decompressor.eof and not more

    def _next(self, size: int) -> bytes:
        """Up to ``size`` bytes, fewer at the end alone."""
        found, left = [], size
        while left and not self._decompressor.eof:
            data = self._rest or next(self._pieces, _NOTHING).data
            try:
                piece = self._decompressor.decompress(data, left)
            except zlib.error as error:
                raise _malformed(str(error)) from error
            self._rest = self._decompressor.unconsumed_tail
            if not len(data) and not piece:
                break
            found.append(piece)
            left -= len(piece)
        return b"".join(found)


def _reader(data: Data, form: Form) -> _Plain | _Compressed:
    return _Compressed(data) if form is Form.compressed else _Plain(data)


def _gap_bytes(gaps: NDArray[np.int64]) -> Data:
    """Each gap as a byte, after as many of 255 as it has of these."""
    if not len(gaps) or int(gaps.max()) < _MORE:
        return gaps.astype(np.uint8)
    ends = np.cumsum(gaps // _MORE + 1) - 1
    found = np.full(int(ends[-1]) + 1, _MORE, np.uint8)
    found[ends] = gaps % _MORE
    return found


def _malformed(what: str) -> ReshardError:
    return ReshardError(f"a delta of weights is malformed: {what}")


def _odd_numbers(start: int, count: int) -> NDArray[np.uint64]:
    """Odd pseudo-random numbers for the indices from ``start``, mixed as in splitmix64."""
    mixed = (np.arange(start + 1, start + count + 1, dtype=np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (mixed ^ (mixed >> np.uint64(31))) | np.uint64(1)


_NOTHING = np.empty(0, np.uint8)
_WEIGHTS = _odd_numbers(0, _ROW)


@dataclass(frozen=True)
class Header:
    """``size``: bytes that follow, of which ``gaps`` are a delta's gaps; ``changed``: its elements; ``base``,
    ``result``: checksums of the bytes that a delta is applied to, and of the message's bytes."""

    form: Form
    size: int
    gaps: int
    changed: int
    base: int
    result: int

    @staticmethod
    def empty() -> Tensor:
        """Place for a header."""
        return torch.zeros(6, dtype=torch.int64)

    def encoded(self) -> Tensor:
        """Header as it is sent."""
        return torch.tensor([int(value) for value in astuple(self)], dtype=torch.int64)

    @classmethod
    def decoded(cls, data: Tensor, full: int) -> Header:
        """The header of a message whose weights are of ``full`` bytes. Raises a ReshardError if it cannot be one."""
        form, *numbers = data.tolist()
        found = cls(Form(form), *numbers) if form in list(Form) else None
        whole = found is not None and found.form is Form.full
        if found is None or not (found.size == full if whole else 0 <= found.size < full):
            raise ReshardError(f"a message of {full} bytes of weights has the header {data.tolist()}")
        return found


HEADER_BYTES = Header.empty().numel() * 8
