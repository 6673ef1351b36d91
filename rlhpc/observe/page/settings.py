"""Settings of a run beside their defaults."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import UnionType
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic_core import to_jsonable_python

from rlhpc.config.schema import RunConfig
from rlhpc.core.redaction import hide

REQUIRED = "required"
_LONGEST = 1000  # characters of a value


def pack_settings(trees: list[dict[str, Any]]) -> list[list[Any]]:
    """[key, default, value of each run] of all keys, in the schema's order; None where a run lacks the key.

    ``trees``: the configurations as they are in the run folders, which lack secrets.
    """
    runs = [dict(_flat(hide(tree)[0])) for tree in trees]
    known: dict[str, str] = {}
    for tree in trees or [{}]:
        for key, value in _flat(_defaults(RunConfig, tree)):
            known.setdefault(key, value)
    keys = dict.fromkeys([*known, *(key for run in runs for key in run)])
    shown = [key for key in keys if not trees or any(key in run for run in runs)]
    return [[key, known.get(key), *(run.get(key) for run in runs)] for key in shown]


def _flat(tree: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Values as text by their dotted keys; a list is one value."""
    if isinstance(tree, dict) and tree:
        for key, item in tree.items():
            yield from _flat(item, f"{path}.{key}" if path else str(key))
    else:
        text = tree if isinstance(tree, str) else json.dumps(tree, default=str)
        yield path, text if len(text) <= _LONGEST else f"{text[:_LONGEST]} …"


def _defaults(section: type[BaseModel], tree: Any) -> dict[str, Any]:
    """Default of each key of a section. Those of an optional section are shown if ``tree`` has it."""
    found: dict[str, Any] = {}
    for name, field in section.model_fields.items():
        given = tree.get(name) if isinstance(tree, dict) else None
        inner = _section(field.annotation)
        default = REQUIRED if field.is_required() else field.get_default(call_default_factory=True)
        if inner is not None and (field.is_required() or (default is None and isinstance(given, dict))):
            found[name] = _defaults(inner, given)
        else:
            found[name] = to_jsonable_python(default, fallback=str)
    return found


def _section(kind: Any) -> type[BaseModel] | None:
    """The one section that a field may hold."""
    options = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    found = [option for option in options if isinstance(option, type) and issubclass(option, BaseModel)]
    return found[0] if len(found) == 1 else None
