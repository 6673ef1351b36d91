"""Reads the JSON schema of the configuration: its keys, and whether a value fits. Written apart from what loads it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from functools import cache
from typing import Any, Literal

from rlhpc.config.load import json_schema

Fit = Literal["yes", "no", "unsure"]
Node = dict[str, Any]


@cache
def schema() -> Node:
    return dict(json.loads(json_schema()))


def options(node: Node) -> list[Node]:
    """The alternatives of a value, null too, with references resolved."""
    if "$ref" in node:
        return options(schema()["$defs"][node["$ref"].rpartition("/")[2]])
    several = node.get("anyOf") or node.get("oneOf")
    return [option for item in several for option in options(item)] if several else [node]


@cache
def all_keys() -> list[tuple[str, Node]]:
    """Every dotted key of the configuration, sections too, with its schema; 0 stands for an item of a list."""
    return list(_keys(schema(), ""))


def _keys(node: Node, above: str) -> Iterator[tuple[str, Node]]:
    for option in options(node):
        inner = dict(option.get("properties", {}))
        if "items" in option:
            inner["0"] = option["items"]
        for name, item in inner.items():
            yield f"{above}{name}", item
            yield from _keys(item, f"{above}{name}.")


def sections() -> list[str]:
    """The dotted keys that have keys inside, the document as an empty one."""
    return ["", *(key for key, node in all_keys() if any("properties" in option for option in options(node)))]


def inside(section: str) -> list[str]:
    """The keys of a section."""
    nodes = [schema()] if not section else [node for key, node in all_keys() if key == section]
    return [name for node in nodes for option in options(node) for name in option.get("properties", {})]


def fit_at(key: str, value: Any) -> Fit:
    """True if the value fits the key, in any of the sections that may be at its place."""
    return fit({"anyOf": [node for name, node in all_keys() if name == key]}, value)


def fit(node: Node, value: Any) -> Fit:
    """True if the value, of a JSON document, fits the schema."""
    found = {_fit(option, value) for option in options(node)}
    return "yes" if "yes" in found else "unsure" if "unsure" in found else "no"


def _fit(node: Node, value: Any) -> Fit:
    if isinstance(value, str) and re.search("[\0\ud800-\udfff]", value):
        return "no"
    if "enum" in node or "const" in node:
        return "yes" if value in node.get("enum", [node.get("const")]) and not isinstance(value, bool) else "no"
    match node.get("type"):
        case None:
            return "unsure"
        case "null":
            return "yes" if value is None else "no"
        case "boolean":
            return "yes" if isinstance(value, bool) else "no"
        case "integer" | "number":
            return _fit_number(node, value)
        case "string":
            return _fit_string(node, value)
        case "array":
            return "unsure" if isinstance(value, list) else "no"
    return "unsure" if isinstance(value, dict) else "no"


def _fit_number(node: Node, value: Any) -> Fit:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "no"
    if isinstance(value, float) and not math.isfinite(value):
        return "no"
    if node["type"] == "integer" and isinstance(value, float):
        return "unsure" if value == int(value) else "no"
    low, above, high = (node.get(bound) for bound in ("minimum", "exclusiveMinimum", "maximum"))
    below = node.get("exclusiveMaximum")
    outside = (low is not None and value < low) or (above is not None and value <= above)
    outside = outside or (high is not None and value > high) or (below is not None and value >= below)
    return "no" if outside else "yes"


def _fit_string(node: Node, value: Any) -> Fit:
    if not isinstance(value, str):
        return "no"
    if "pattern" in node and not re.search(node["pattern"].replace("$", r"\Z"), value):
        return "no"
    return "no" if len(value) > node.get("maxLength", math.inf) else "yes"
