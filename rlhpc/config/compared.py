"""Keys in which two configurations differ. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any


def differing_keys(first: Any, second: Any, without: Collection[str], key: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Each key in which two configurations differ, as dumped to JSON, with both values. ``without``: keys, and whole
    sections, that do not count; ``key``: that of the sections compared."""
    if key in without:
        return
    if isinstance(first, dict) and isinstance(second, dict):
        for name in {**first, **second}:
            yield from differing_keys(first.get(name), second.get(name), without, f"{key}.{name}" if key else name)
    elif first != second:
        yield key, first, second
