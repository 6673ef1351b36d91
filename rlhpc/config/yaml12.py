"""YAML with the scalars of YAML 1.2, an error on duplicate keys, and the line of every key.

PyYAML follows YAML 1.1, where ``1e-6`` is a string, ``no`` a boolean, ``12:30`` a number and ``010`` is eight.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
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


# Bounds that no configuration reaches and no reading exceeds in time and memory.
_BYTES, _VALUES, _DEPTH, _DIGITS = 2**20, 20_000, 64, 100
_CORE = "tag:yaml.org,2002:"
_NOT_TEXT = re.compile("[\0\ud800-\udfff]")  # neither a path, nor UTF-8, nor an environment variable can have them


class _Loader(yaml.SafeLoader):
    """Composes within the bounds, and constructs the types of JSON alone."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._depth = self._count = 0

    def compose_node(self, parent: Any, index: Any) -> yaml.Node | None:
        mark: yaml.Mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
        self._depth, self._count = self._depth + 1, self._count + 1
        if self._depth > _DEPTH:
            raise _error(f"nested more than {_DEPTH} deep", mark)
        if self._count > _VALUES:
            raise _error(f"more than {_VALUES:,} values", mark)
        node: yaml.Node | None = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def construct_mapping(self, node: yaml.MappingNode, *args: Any, **keywords: Any) -> dict:
        _refuse_duplicate_keys(node)
        return super().construct_mapping(node, *args, **keywords)


class _Dumper(yaml.SafeDumper):
    """Quotes strings that YAML 1.1 or 1.2 would read as another type."""


def _construct_scalar(loader: _Loader, node: yaml.ScalarNode) -> Any:
    """A value whose tag, given or found, is one of those above."""
    text = loader.construct_scalar(node)
    kind = node.tag.removeprefix(_CORE)
    if not re.fullmatch(_SCALARS[node.tag][0], text):
        raise _error(f"{text[:40]!r} does not fit its tag !!{kind}", node.start_mark)
    if kind == "int" and len(digits := text.lstrip("+-").removeprefix("0o").removeprefix("0x")) > _DIGITS:
        raise _error(f"a number of {len(digits):,} digits", node.start_mark)
    match kind:
        case "null":
            return None
        case "bool":
            return text.lower() == "true"
        case "int":
            return int(text, 0) if text[:2] in ("0o", "0x") else int(text)
    return float(re.sub(r"\.(?=[iInN])", "", text))


def _construct_text(loader: _Loader, node: yaml.ScalarNode) -> str:
    text: str = loader.construct_scalar(node)
    if found := _NOT_TEXT.search(text):
        raise _error(f"a text with the character {found[0]!r}", node.start_mark)
    return text


def _refuse_tag(loader: _Loader, node: yaml.Node) -> Any:
    tag = node.tag.replace(_CORE, "!!")
    raise _error(f"the tag {tag[:80]} is not supported", node.start_mark)


def _error(problem: str, mark: yaml.Mark) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=mark)


_Loader.yaml_implicit_resolvers = {}  # without YAML 1.1's; the dumper keeps those and quotes what they match
for _tag, (_pattern, _first) in _SCALARS.items():
    for _class in (_Loader, _Dumper):
        _characters = [*_first, ""] if _tag.endswith("null") else [*_first]
        _class.add_implicit_resolver(_tag, re.compile(rf"^(?:{_pattern})$"), _characters)
_Loader.yaml_constructors = {  # not YAML 1.1's: sets, dates, bytes
    **{tag: _construct_scalar for tag in _SCALARS if not tag.endswith("merge")},
    f"{_CORE}str": _construct_text,
    f"{_CORE}seq": yaml.SafeLoader.construct_yaml_seq,
    f"{_CORE}map": yaml.SafeLoader.construct_yaml_map,
    None: _refuse_tag,
}


@dataclass(frozen=True)
class Document:
    """A document's value, and the line of each dotted key; ``data.train.0`` is a list item."""

    value: Any
    lines: dict[str, int]


def read(text: str, where: str) -> Document:
    """Returns a YAML document. Raises UserError at ``where:line`` for bad syntax, a duplicate key, or a document that
    is larger or deeper than any configuration."""
    if len(text) > _BYTES:
        raise UserError(f"is larger than {_BYTES / 2**20:g} MiB", where=where, remedy="give a configuration")
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return Document(None, {})
        _check_aliases(node)
        lines = _lines(node)  # before construction, which merges keys
        return Document(loader.construct_document(node), lines)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f"{where}:{mark.line + 1}" if mark else where
        context = f" {error.context}" if error.context else ""
        raise UserError(f"{error.problem}{context}", where=line, remedy="correct the YAML") from None
    except yaml.YAMLError as error:
        raise UserError(f"not YAML ({error})", where=where, remedy="correct the file") from None


def parse(text: str, where: str) -> Any:
    """Returns the value of a YAML document, as ``read`` does."""
    return read(text, where).value


def _check_aliases(root: yaml.Node) -> None:
    """Refuses an alias to a value around it, and aliases that stand for more values than a document may have."""
    sizes: dict[int, int | None] = {}  # by node; None while its items are visited

    def size(node: yaml.Node) -> int:
        known = sizes.get(id(node), 0)
        if known is None:
            raise _error("an alias stands for the value that it is in", node.start_mark)
        if known or isinstance(node, yaml.ScalarNode):
            return known or 1
        sizes[id(node)] = None
        items = node.value if isinstance(node, yaml.SequenceNode) else [item for pair in node.value for item in pair]
        total = 1 + sum(map(size, items))
        if total > _VALUES:
            raise _error(f"aliases stand for more than {_VALUES:,} values", node.start_mark)
        sizes[id(node)] = total
        return total

    size(root)


def _lines(root: yaml.Node) -> dict[str, int]:
    lines: dict[str, int] = {}

    def visit(node: yaml.Node, prefix: str) -> None:
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

    visit(root, "")
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
