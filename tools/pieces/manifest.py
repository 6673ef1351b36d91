"""Cuts wheels into pieces, and writes the manifest by which a bare machine joins and verifies them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tools.pieces.wheels import Wheel

MANIFEST = "manifest.json"
FORMAT = 1
_BLOCK = 1 << 20


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_pieces(wheels: Sequence[Wheel], folder: Path, limit: int) -> list[dict[str, Any]]:
    """Cut the concatenated wheels into files of ``limit`` bytes, the last possibly smaller."""
    total = sum(wheel.bytes for wheel in wheels)
    count = max(1, -(-total // limit))
    stream = _blocks(wheels, limit)
    pieces = []
    for number in range(1, count + 1):
        path = folder / f"piece-{number:02d}-of-{count:02d}"
        size, digest = 0, hashlib.sha256()
        with path.open("wb") as file:
            while size < limit and (block := next(stream, b"")):
                size += file.write(block)
                digest.update(block)
        pieces.append({"file": path.name, "bytes": size, "sha256": digest.hexdigest()})
    return pieces


def _blocks(wheels: Sequence[Wheel], limit: int) -> Iterator[bytes]:
    """Contents of all wheels in blocks that do not cross a multiple of ``limit``."""
    written = 0
    for wheel in wheels:
        with wheel.path.open("rb") as file:
            while block := file.read(min(_BLOCK, limit - written % limit)):
                written += len(block)
                yield block


def write_manifest(
    folder: Path, fields: dict[str, Any], wheels: Sequence[Wheel], pieces: list[dict[str, Any]]
) -> dict[str, Any]:
    """Write and return the manifest; ``fields``: those that describe the target and the set."""
    rows = [
        {"file": wheel.path.name, "name": wheel.name, "version": wheel.version}
        | {"bytes": wheel.bytes, "sha256": sha256_of(wheel.path)}
        for wheel in wheels
    ]
    document = {"format": FORMAT, **fields, "wheels": rows, "pieces": pieces}
    (folder / MANIFEST).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    return document
