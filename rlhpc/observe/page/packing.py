"""Packs the page's numbers and texts: compressed, as base64."""

from __future__ import annotations

import base64
import gzip
import json
import math
import sys
from array import array
from collections.abc import Iterable
from typing import Any

_LEVEL = 6
Place = list[int]  # first number and count


class Numbers:
    """All numbers of the page as float32. Equal sequences are kept once."""

    def __init__(self) -> None:
        self.data = array("f")
        self._places: dict[bytes, Place] = {}

    def put(self, values: Iterable[float]) -> Place:
        """Adds numbers; returns their place for the page's scripts."""
        added = array("f", values)
        key = added.tobytes()
        if key not in self._places:
            self._places[key] = [len(self.data), len(added)]
            self.data.extend(added)
        return self._places[key]

    def __len__(self) -> int:
        return len(self.data)

    def packed(self) -> str:
        """One gzip stream: the first bytes of all numbers, then the second ones and so on, which compresses best."""
        data = self.data
        if sys.byteorder == "big":
            data = data[:]
            data.byteswap()
        raw = data.tobytes()
        return _packed(b"".join(raw[plane::4] for plane in range(4)))


def pack_texts(value: Any) -> str:
    """A JSON document as one gzip stream; null in place of numbers that JSON lacks."""
    try:
        text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    except ValueError:
        text = json.dumps(_finite(value), separators=(",", ":"))
    return _packed(text.encode())


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _packed(raw: bytes) -> str:
    return base64.b64encode(gzip.compress(raw, _LEVEL, mtime=0)).decode("ascii")
