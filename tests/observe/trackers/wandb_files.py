"""Reads the files of offline W&B runs: records in LevelDB's log format, of which W&B has no reader of its own."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlhpc.core.folder import RunFolder

_HEADER, _MAGIC, _START = struct.Struct("<IHB"), b":W&B", 7
_BLOCK = 32768
_FULL, _LAST = 1, 4  # kinds of a part that ends a record


def rows(folder: RunFolder) -> list[dict[str, Any]]:
    """Rows of all files of the tracker, as far as killed processes have written them, in the order of their starts."""
    runs = sorted(folder.trackers.files("wandb").glob("wandb/offline-run-*"))
    return [row for run in runs for file in run.glob("*.wandb") for row in _rows(file)]


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    for record in _records(path):
        if record.WhichOneof("record_type") == "history":
            yield {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}


def _records(path: Path) -> Iterator[Any]:
    from wandb.proto.wandb_internal_pb2 import Record

    data = path.read_bytes()
    at, parts = _START, b""
    while data.startswith(_MAGIC) and at + _HEADER.size <= len(data):
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
