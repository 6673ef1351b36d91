"""Small files written whole or not at all."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def write_atomic(path: Path, text: str) -> None:
    """Write ``text`` so that a reader sees the old file or the new one, never a part. The folder must be there: to make
    one here would give back a place to write to ranks that were fenced off (rlhpc.core.attempts)."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def write_json(path: Path, value: Any) -> None:
    """Write a JSON document atomically, indented, keys in the order given."""
    write_atomic(path, json.dumps(value, indent=2) + "\n")


def read_json(path: Path) -> Any:
    """The JSON document at ``path``."""
    return json.loads(path.read_text(encoding="utf-8"))
