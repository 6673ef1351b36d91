"""Loads a RunConfig from a YAML file and command-line overrides, and writes it back."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from rlhpc.config import yaml12
from rlhpc.config.familiar import FIXED, familiar_keys
from rlhpc.config.observe import NO_TRACKER, wrong_kind
from rlhpc.config.reward import DEFAULT_FUNCTION, NO_KIND
from rlhpc.config.saved import with_secrets
from rlhpc.config.schema import RunConfig
from rlhpc.config.site_file import SiteValues, expand_site, take_site
from rlhpc.core.errors import SHOWN_ERRORS, UserError, UserErrors, did_you_mean, nearest
from rlhpc.core.inputs import read_input
from rlhpc.core.redaction import hide, learn

COMMAND_LINE = "command line"
_KEY_DEPTH = 32  # dots in the key of an override


@dataclass(frozen=True)
class Loaded:
    """A configuration merged with the site file, and what it takes from there; None without a site file."""

    config: RunConfig
    site: SiteValues | None


def load_config(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Returns the configuration in ``path``, with ``key.sub=value`` overrides above and the site file's values below.

    Relative paths in the file are relative to the working folder. Raises one UserError with at most 20 errors,
    each with file and line, dotted key, value and allowed values.
    """
    return load_with_site(path, overrides).config


def load_with_site(path: Path, overrides: Sequence[str] = ()) -> Loaded:
    """The same, with the keys that come from the site file."""
    text = _read(path)
    document = yaml12.read(text, str(path))
    data, lines = document.value, document.lines
    if not isinstance(data, dict):
        raise UserError(
            "contains no keys", where=str(path), remedy="write 'key: value' lines, see `rlhpc configs demo`"
        )
    data = with_secrets(data, path, lines)
    places = {key: f"{path}:{line}" for key, line in lines.items()}
    expand_site(data)
    for override in overrides:
        key, value = _parse_override(override)
        _apply_override(data, key, value)
        places = {other: place for other, place in places.items() if not f"{other}.".startswith(f"{key}.")}
        for part in _parents(key):
            places.setdefault(part, COMMAND_LINE)
    site = take_site(data)
    if site is not None:
        for key, line in site.keys.items():
            for part in _parents(key):
                places.setdefault(part, f"{site.path}:{line}")
    learn(data)
    try:
        # JSON mode accepts a string as a path and an integer as a float, and is strict about all other types.
        return Loaded(RunConfig.model_validate_json(json.dumps(data), strict=True), site)
    except ValidationError as error:
        details = error.errors(include_url=False, include_context=False)
        raise _user_error(details, places, str(path)) from None


def absolute_paths(config: RunConfig) -> RunConfig:
    """Makes relative paths absolute from the working folder, for ranks that start in another one."""
    return RunConfig.model_validate(_absolute(config.model_dump()))


def _absolute(value: Any) -> Any:
    if isinstance(value, Path):
        return value.absolute()
    if isinstance(value, dict):
        return {key: _absolute(item) for key, item in value.items()}
    return [_absolute(item) for item in value] if isinstance(value, list) else value


def dump_config(config: RunConfig) -> str:
    """Returns YAML with every key, defaults included, that loads as the same configuration."""
    return yaml12.dump(config.model_dump(mode="json"))


def json_schema() -> str:
    """Returns the JSON schema of the configuration, for editors."""
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **_schema()}
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


@cache
def _schema() -> dict[str, Any]:
    return RunConfig.model_json_schema()


def _read(path: Path) -> str:
    try:
        return read_input(path, piped=True).decode()
    except FileNotFoundError:
        folder = path.parent
        there = [file.name for file in folder.glob("*.y*ml")] if folder.is_dir() else []
        close = nearest(path.name, there)
        remedy = f"did you mean {str(folder / close[0])!r}?" if close else "give the path of a configuration"
        raise UserError("no such file", where=str(path), remedy=remedy) from None
    except UnicodeDecodeError as error:
        raise UserError(f"cannot be read ({error})", where=str(path), remedy="give a YAML file") from None


def _parse_override(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not all(key.split(".")) or key.count(".") > _KEY_DEPTH:
        raise UserError(f"{text!r} is not an override", where=COMMAND_LINE, remedy="write it as key.sub=value")
    return key, yaml12.parse(value, f"{COMMAND_LINE}: {key}")


def _apply_override(data: dict[str, Any], key: str, value: Any) -> None:
    """Sets the item at the dotted ``key``; creates absent or null sections on the way."""
    *parents, last = key.split(".")
    item: Any = data
    for depth, part in enumerate([*parents, last]):
        if isinstance(item, list):
            index = _list_index(item, part, key)
            if depth < len(parents):
                item[len(item) :] = [{}] * (index == len(item))
                item = item[index]
            else:
                item[index : index + 1] = [value]
        elif not isinstance(item, dict):
            parent = ".".join(key.split(".")[:depth])
            raise UserError(f"{parent} = {item!r} has no keys inside", where=f"{COMMAND_LINE}: {key}")
        elif depth == len(parents):
            if part == "model" and isinstance(item, _DefaultItem) and item.get("function") == DEFAULT_FUNCTION:
                del item["function"]
            item[part] = value
        else:
            if item.get(part) is None:
                inner = [*parents, last][depth + 1]
                item[part] = _default_items(parents[: depth + 1]) if inner.isdecimal() else {}
            item = item[part]


class _DefaultItem(dict[str, Any]):
    """A default item that an override changes; its function gives way to a model."""


def _default_items(parts: Sequence[str]) -> list[Any]:
    """Returns the items that the list at these keys has by default."""
    node: dict[str, Any] = _schema()
    for part in parts:
        inner = [option["properties"][part] for option in _options(node) if part in option.get("properties", ())]
        if not inner:
            return []
        node = inner[0]
    found = node.get("default")
    items = found if isinstance(found, list) else []
    return [
        _DefaultItem({key: value for key, value in item.items() if value}) if isinstance(item, dict) else item
        for item in items
    ]


def _parents(key: str) -> list[str]:
    """Returns the dotted key and all sections that contain it, innermost first."""
    parts = key.split(".")
    return [".".join(parts[:length]) for length in range(len(parts), 0, -1)]


def _list_index(items: list[Any], part: str, key: str) -> int:
    """Returns ``part`` as an index into ``items``; the index after the last item appends."""
    if part.isdecimal() and int(part) <= len(items):
        return int(part)
    raise UserError(
        f"{part!r} is not an item of a list of {len(items)}",
        where=f"{COMMAND_LINE}: {key}",
        remedy=f"use a number from 0 to {len(items)}",
    )


def _user_error(details: Sequence[ErrorDetails], places: Mapping[str, str], file: str) -> UserError:
    """Joins schema errors into one UserError, those of known keys before unknown keys."""
    first: dict[tuple[int | str, ...], ErrorDetails] = {}
    for detail in details:  # one error per place, not one per type that its value may have
        first.setdefault(_location(detail), detail)
    ordered = sorted(first.items(), key=lambda item: item[1]["type"] == "extra_forbidden")
    faults = [fault for location, detail in ordered for fault in _faults(detail, location, places, file)]
    errors = [fault() for fault in faults[:SHOWN_ERRORS]]
    return errors[0] if len(faults) == 1 else UserErrors(errors, more=len(faults) - len(errors))


def _location(detail: ErrorDetails) -> tuple[int | str, ...]:
    """Returns keys, list indices, and the class name of an entry in a list of several classes, without the other
    parts that pydantic adds for unions."""
    node, found = _schema(), []
    for part in detail["loc"]:
        options = [option for option in _options(node) if _has(option, part)]
        if not options and detail["type"] != "extra_forbidden":
            break
        found.append(part)
        node = _inside(options[0], part) if options else {}
    return tuple(found)


def _faults(
    detail: ErrorDetails, location: Sequence[int | str], places: Mapping[str, str], file: str
) -> Iterator[Callable[[], UserError]]:
    """Yields what makes each error: of thousands, few are shown, and the search for a near name takes time."""
    kind, value, key = detail["type"], detail["input"], _key(location)
    familiar = list(familiar_keys(key, value)) if kind == "extra_forbidden" else []
    for name, ours in familiar:
        where = f"{_place(name, places, file)}: {name}"
        yield partial(UserError, "unknown key", where=where, remedy=f"write {ours}")
    if not familiar:
        yield partial(_fault, detail, location, f"{_place(key, places, file)}: {key}")


def _fault(detail: ErrorDetails, location: Sequence[int | str], where: str) -> UserError:
    kind, value = detail["type"], detail["input"]
    if kind == "extra_forbidden" and (fixed := FIXED.get(_key([part for part in location if isinstance(part, str)]))):
        return UserError(f"no longer a key: {fixed}", where=where, remedy="leave it out")
    if kind == "extra_forbidden":
        return UserError("unknown key", where=where, remedy=did_you_mean(str(location[-1]), _valid_keys(location[:-1])))
    if kind == "missing":
        return UserError("is missing", where=where, remedy="add it")
    if kind == NO_KIND:
        return UserError("needs either function or model", where=where, remedy="give one of the two")
    if kind == NO_TRACKER:
        message, remedy = wrong_kind(value)
        return UserError(message, where=where, remedy=remedy)
    shown = repr(hide(value, ".".join(map(str, location)))[0])
    shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
    return UserError(f"{shown} is not allowed", where=where, remedy=f"allowed: {_allowed(location)}")


def _key(location: Sequence[int | str]) -> str:
    """Returns the dotted key, without class names."""
    classes = _schema()["$defs"]
    return ".".join(str(part) for part in location if part not in classes)


def _place(key: str, places: Mapping[str, str], file: str) -> str:
    """Returns where the key, or the innermost section around it, was set."""
    return next((places[part] for part in _parents(key) if part in places), file)


def _valid_keys(location: Sequence[int | str]) -> list[str]:
    """Returns the keys of the section at ``location``."""
    return [key for option in _options(_node(location)) for key in option.get("properties", ())]


def _allowed(location: Sequence[int | str]) -> str:
    """Describes the values allowed at ``location``."""
    return _in_words(_node(location))


def _node(location: Sequence[int | str]) -> dict[str, Any]:
    """Returns the schema at ``location``."""
    node = _schema()
    for part in location:
        node = _inside(next(option for option in _options(node) if _has(option, part)), part)
    return node


def _options(node: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the alternatives of a value except null, with references resolved."""
    if "$ref" in node:
        return _options(_schema()["$defs"][node["$ref"].rpartition("/")[2]])
    for several in ("anyOf", "oneOf"):
        if several in node:
            return [option for item in node[several] for option in _options(item)]
    return [] if node.get("type") == "null" else [node]


def _has(option: dict[str, Any], part: int | str) -> bool:
    """True if ``part`` is a key or index of the option, or its class name."""
    if isinstance(part, int):
        return "items" in option or "prefixItems" in option
    return part in option.get("properties", ()) or part == option.get("title")


def _inside(option: dict[str, Any], part: int | str) -> dict[str, Any]:
    if isinstance(part, int):
        items: dict[str, Any] = option["prefixItems"][part] if "prefixItems" in option else option["items"]
        return items
    return option if part == option.get("title") else dict(option["properties"][part])


def _in_words(node: dict[str, Any]) -> str:
    return " or ".join(dict.fromkeys(_one_in_words(option) for option in _options(node)))


def _one_in_words(node: dict[str, Any]) -> str:
    if "enum" in node:
        return " or ".join(repr(value) for value in node["enum"])
    match node.get("type"):
        case "object":
            return "a section of 'key: value' lines"
        case "array" if "prefixItems" in node:
            return "a list of " + ", ".join(_in_words(item) for item in node["prefixItems"])
        case "array":
            least = f" of at least {node['minItems']}" if "minItems" in node else ""
            return f"a list{least}, each item {_in_words(node['items'])}"
        case "string":
            kind = "a path" if node.get("format") == "path" else "a string"
            kind += f" that matches {node['pattern']}" if "pattern" in node else ""
            return f"{kind}, of at most {node['maxLength']} characters" if "maxLength" in node else kind
        case "boolean":
            return "true or false"
    bounds = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most"}
    words = [f"{word} {node[bound]:g}" for bound, word in bounds.items() if bound in node]
    return " ".join(["an integer" if node.get("type") == "integer" else "a number", " and ".join(words)]).strip()
