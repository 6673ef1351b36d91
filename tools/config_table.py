"""Rewrites the table of keys in docs/configuration.md, with the peers' names, and that of `efficiency` in docs/site.md.

python -m tools.config_table
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlhpc.config.schema import RunConfig
from rlhpc.config.site import EfficiencySection
from tools.markers import rewrite
from tools.peer_keys import PEERS

DOCS = Path(__file__).parents[1] / "docs"
PAGE, SITE_PAGE = DOCS / "configuration.md", DOCS / "site.md"
MARKER, SITE_MARKER = "config-table", "efficiency-table"
_ONE_ROW = {"site.efficiency": "What `rlhpc plan calibrate` writes: [names and defaults](site.md)."}
_ANY = 10**9  # bound of every number, not worth a word


def table() -> str:
    """Markdown with a row per key, sections in the schema's order.

    A section like an earlier one has a row that names it, and rows for the keys that differ.
    """
    rows = [
        f"| `{key}` | {_value(field)} | {_meaning(field)} {_peers(key)}"
        for key, field in _without_repetition(dict(keys(RunConfig.model_json_schema())))
    ]
    head = ["| key | value (default) | meaning | in verl, TRL |", "| --- | --- | --- | --- |"]
    return "\n".join([*head, *rows]) + "\n"


def site_table() -> str:
    """Markdown with a row per key of the site file's section ``efficiency``."""
    rows = [
        f"| `{key}` | {default(field)} | {_meaning(field)} |"
        for key, field in keys(EfficiencySection.model_json_schema())
    ]
    return "\n".join(["| key | default | meaning |", "| --- | --- | --- |", *rows]) + "\n"


def _without_repetition(fields: dict[str, dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Keys in their order, with sections that repeat an earlier one as a key of their own."""
    sections: dict[str, dict[str, dict[str, Any]]] = {}
    for key, field in fields.items():
        parts = key.split(".")
        for depth in range(1, len(parts)):
            sections.setdefault(".".join(parts[:depth]), {})[".".join(parts[depth:])] = field
    like = {name: found for name in sections if (found := _earlier(name, sections)) is not None}
    named: set[str] = set()
    for key, field in fields.items():
        section = next((name for name in like if key.startswith(f"{name}.")), None)
        if section is None:
            yield key, field
            continue
        if section not in named:
            named.add(section)
            yield section, {"$ref": "", "required": False, "description": f"Keys of `{like[section]}`."}
        if _differs(field, sections[like[section]].get(key.removeprefix(f"{section}."))):
            yield key, field


def _earlier(name: str, sections: dict[str, dict[str, dict[str, Any]]]) -> str | None:
    """The first section that has three and most of a later one's own keys."""
    own = {key: field for key, field in sections[name].items() if "." not in key}
    for other, keys_there in sections.items():
        if other == name:
            return None
        equal = sum(not _differs(field, keys_there.get(key)) for key, field in own.items())
        if equal >= max(3, len(own) / 2) and not name.startswith(f"{other}."):
            return other
    return None


def _differs(field: dict[str, Any], earlier: dict[str, Any] | None) -> bool:
    """True if a key of a repeated section differs from the earlier one's; a default of none stands for its value."""
    if earlier is None or _kind(field) != _kind(earlier):
        return True
    return default(field) not in ("none", default(earlier))


def _peers(key: str) -> str:
    """Cell with the peers' names of the key, TRL's after its own."""
    cells = []
    for peer, names in zip(("", "TRL "), PEERS.get(key, ("", "")), strict=True):
        words = (f"{'' if name[:4] != 'not ' else 'not '}`{name.removeprefix('not ')}`" for name in names.split(", "))
        cells += [peer + ", ".join(words)] if names else []
    return f"| {', '.join(cells)} |" if cells else "| |"


def keys(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(dotted key, JSON schema) of every key that is not a section; keys of list items have [] for the index."""

    def defined(reference: dict[str, Any]) -> dict[str, Any]:
        return schema["$defs"][reference["$ref"].rpartition("/")[2]]

    def walk(node: dict[str, Any], prefix: str) -> Iterator[tuple[str, dict[str, Any]]]:
        for name, field in node["properties"].items():
            section = next((s for s in _alternatives(field) if "$ref" in s), None)
            required = {"required": name in node.get("required", [])}
            if prefix + name in _ONE_ROW:
                yield prefix + name, {"$ref": "", "description": _ONE_ROW[prefix + name], **required}
                continue
            if section is not None:
                yield from walk(defined(section), f"{prefix}{name}.")
                continue
            yield prefix + name, {**field, **required}
            lists = (s["items"] for s in _alternatives(field) if "items" in s)
            references = (item for kind in lists for item in _alternatives(kind) if "$ref" in item)
            items = [item for item in map(defined, references) if "properties" in item]
            found: dict[str, dict[str, Any]] = {}
            for item in items:  # a key of several kinds of items is listed once; none of their keys is always required
                for key, one in walk(item, f"{prefix}{name}[]."):
                    found.setdefault(key, {**one, "required": one["required"] and len(items) == 1})
            yield from found.items()

    yield from walk(schema, "")


def _alternatives(field: dict[str, Any]) -> list[dict[str, Any]]:
    """The field itself, or its alternatives except null."""
    return [s for s in field.get("anyOf", field.get("oneOf", [field])) if s.get("type") != "null"]


def _kind(field: dict[str, Any]) -> str:
    first, *others = _alternatives(field)
    if others:
        return " or ".join(_kind(kind) for kind in (first, *others))
    kind = first
    if "$ref" in kind:
        return "section"
    if "prefixItems" in kind:
        return "[" + ", ".join(_kind(item) for item in kind["prefixItems"]) + "]"
    if "enum" in kind:
        return ", ".join(f"`{value}`" for value in kind["enum"])
    if kind.get("type") == "array":
        words = dict.fromkeys(_kind(item) for item in _alternatives(kind["items"]))
        return "list of " + " or ".join(f"{word}s" if word.isalpha() else word for word in words)
    if kind.get("type") == "object":
        return "mapping"
    if kind.get("type") in ("integer", "number"):
        return _bounded(kind)
    if kind.get("type") == "boolean":
        return "boolean"
    if kind.get("format") == "path":
        return "path"
    return "`package.module:name`" if r":\w+" in kind.get("pattern", "") else "text"


def _value(field: dict[str, Any]) -> str:
    """Kind of value, and in parentheses the default if there is one."""
    given = default(field)
    if given == "required":
        return f"{_kind(field)}, required"
    return _kind(field) if given == "none" else f"{_kind(field)} ({given})"


def _bounded(kind: dict[str, Any]) -> str:
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤"}
    bounds = [f"{sign}{kind[bound]:g}" for bound, sign in signs.items() if kind.get(bound, _ANY) < _ANY]
    return ", ".join([str(kind["type"]), *bounds])


def default(field: dict[str, Any]) -> str:
    if field["required"]:
        return "required"
    value = field.get("default")
    if value in (None, [], {}):
        return "none"
    if isinstance(value, list) and isinstance(value[0], dict):
        value = "[" + ", ".join(_entry(item) for item in value) + "]"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _entry(item: dict[str, Any]) -> str:
    """A section of a list as YAML in a line, without empty keys."""
    return "{" + ", ".join(f"{key}: {value}" for key, value in item.items() if value not in (None, [], {})) + "}"


def _meaning(field: dict[str, Any]) -> str:
    return " ".join(str(field["description"]).split()).replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    rewrite(PAGE, MARKER, table())
    rewrite(SITE_PAGE, SITE_MARKER, site_table())
