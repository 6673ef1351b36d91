"""Checks byte ranges of source files with a CRC-32 on record, when a process first reads from them."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rlhpc.checkpoint.formats.arrays import Array, CheckedRange, FileArray, hold
from rlhpc.core.errors import UserError

_HELD_BYTES = 64 << 20  # a larger range is read a second time


class RangeChecker:
    """Checks each range once, so that nothing is written from a damaged one."""

    def __init__(self) -> None:
        self._good: set[CheckedRange] = set()
        self._buffer: Array = np.empty(0, np.uint8)

    def check(self, array: FileArray) -> None:
        """Checks the range that contains the array. Raises UserError."""
        span = array.span
        if span is None or span in self._good:
            return
        if self._checksum(span) != span.crc:
            raise UserError(
                f"bytes {span.start} to {span.start + span.length} differ from their CRC-32 on record",
                where=str(span.path),
                remedy=f"copy the file again, or remove {span.record} if another program wrote the weights since"
                if span.record
                else "copy or save the checkpoint again",
            )
        self._good.add(span)

    def _checksum(self, span: CheckedRange) -> int:
        if span.length > _HELD_BYTES:
            return _checksum_by_parts(span)
        if len(self._buffer) < span.length:
            self._buffer = np.empty(span.length, np.uint8)
        data = self._buffer[: span.length]
        FileArray(span.path, span.start, "U8", data.shape).read_bytes(data)
        hold(span, data)
        return zlib.crc32(memoryview(data))


def _checksum_by_parts(span: CheckedRange) -> int:
    checksum, buffer = 0, np.empty(8 << 20, np.uint8)
    for at in range(0, span.length, len(buffer)):
        data = buffer[: min(len(buffer), span.length - at)]
        FileArray(span.path, span.start + at, "U8", data.shape).read_bytes(data)
        checksum = zlib.crc32(memoryview(data), checksum)
    return checksum


def recorded_ranges(record: Mapping[str, Any], folder: Path, name: str) -> dict[tuple[Path, int], CheckedRange]:
    """Ranges in a conversion's record, by file and start. ``name``: the record's file."""
    found = {}
    try:
        for piece in record["items"].values():
            path = folder / piece["file"]
            for start, length, crc in piece["items"]:
                found[path, start] = CheckedRange(path, start, length, crc, name)
    except (LookupError, TypeError, ValueError, AttributeError):
        return {}  # verify reports it
    return found
