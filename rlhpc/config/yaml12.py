"""YAML with the scalars of YAML 1.2, an error on duplicate keys, and the line of every key.

PyYAML follows YAML 1.1, where ``1e-6`` is a string, ``no`` a boolean, ``12:30`` a number and ``010`` is eight.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from rlhpc.core.errors import UserError

# https://yaml.org/spec/1.2.2/#103-core-schema
_SCALARS: dict[str, tuple[str, str]] = {
    "tag:yaml.org,2002:null": (r"~|null|Null|NULL|", "~nN"),
    "tag:yaml.org,2002:bool": (r"true|True|TRUE|false|False|FALSE", "tTfF"),
    "tag:yaml.org,2002:int": (r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789"),
    "tag:yaml.org,2002:float": (
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+.0123456789",
    ),
    "tag:yaml.org,2002:merge": (r"<<", "<"),
}


class _Loader(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, *args: Any, **keywords: Any) -> dict:
        _refuse_duplicate_keys(node)
        return super().construct_mapping(node, *args, **keywords)


class _Dumper(yaml.SafeDumper):
    """Quotes strings that YAML 1.1 or 1.2 would read as another type."""


def _construct_int(loader: _Loader, node: yaml.ScalarNode) -> int:
    text = loader.construct_scalar(node)
    return int(text, 0) if text[:2] in ("0o", "0x") else int(text)


_Loader.yaml_implicit_resolvers = {}  # without YAML 1.1's; the dumper keeps those and quotes what they match
for _tag, (_pattern, _first) in _SCALARS.items():
    for _class in (_Loader, _Dumper):
        _characters = [*_first, ""] if _tag.endswith("null") else [*_first]
        _class.add_implicit_resolver(_tag, re.compile(rf"^(?:{_pattern})$"), _characters)
_Loader.add_constructor("tag:yaml.org,2002:int", _construct_int)


def parse(text: str, where: str) -> Any:
    """Returns the value of a YAML document. Raises UserError at ``where:line`` for bad syntax or a duplicate key."""
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f"{where}:{mark.line + 1}" if mark else where
        context = f" {error.context}" if error.context else ""
        raise UserError(f"{error.problem}{context}", where=line, remedy="correct the YAML") from None
    except yaml.YAMLError as error:
        raise UserError(f"not YAML ({error})", where=where, remedy="correct the file") from None


def key_lines(text: str) -> dict[str, int]:
    """Returns the line number of each dotted key of a valid document; ``data.train.0`` is a list item."""
    lines: dict[str, int] = {}

    def visit(node: yaml.Node | None, prefix: str) -> None:
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                if isinstance(key, yaml.ScalarNode):
                    enter(key, value, f"{prefix}{key.value}")
        elif isinstance(node, yaml.SequenceNode):
            for index, item in enumerate(node.value):
                enter(item, item, f"{prefix}{index}")

    def enter(start: yaml.Node, value: yaml.Node, key: str) -> None:
        lines[key] = start.start_mark.line + 1
        visit(value, f"{key}.")

    visit(yaml.compose(text, _Loader), "")
    return lines


def dump(value: Any) -> str:
    """Returns YAML that ``parse`` reads as the same value, with keys in the same order."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def _refuse_duplicate_keys(node: yaml.MappingNode) -> None:
    seen: dict[str, int] = {}
    for key, _ in node.value:
        if not isinstance(key, yaml.ScalarNode) or key.tag.endswith("merge"):
            continue
        line = key.start_mark.line + 1
        if key.value in seen:
            raise yaml.MarkedYAMLError(
                problem=f"key {key.value!r} is given twice, first in line {seen[key.value]}",
                problem_mark=key.start_mark,
            )
        seen[key.value] = line
