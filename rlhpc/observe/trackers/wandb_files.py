"""Reads the files of W&B: records in LevelDB's log format, 32 KiB blocks of checksum, length, kind and data."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_HEADER, _MAGIC, _START = struct.Struct("<IHB"), b":W&B", 7
_BLOCK = 32768
_FULL, _LAST = 1, 4  # kinds of a part that ends a record


def histories(path: Path) -> Iterator[dict[str, Any]]:
    """Rows that were logged, as far as a killed process has written them."""
    for record in _records(path):
        if record.WhichOneof("record_type") == "history":
            yield {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}


def _records(path: Path) -> Iterator[Any]:
    from wandb.proto.wandb_internal_pb2 import Record

    data = path.read_bytes()
    if not data.startswith(_MAGIC):
        return
    at, parts = _START, b""
    while at + _HEADER.size <= len(data):
        left = _BLOCK - at % _BLOCK
        if left < _HEADER.size:  # filled with zeros
            at += left
            continue
        _, size, kind = _HEADER.unpack_from(data, at)
        begin = at + _HEADER.size
        at = begin + size
        if kind == 0 or at > len(data):
            return
        parts += data[begin:at]
        if kind in (_FULL, _LAST):
            yield Record.FromString(parts)
            parts = b""
