"""Descriptions of keys in a schema: the docstrings below the fields of a section.

Pydantic's ``use_attribute_docstrings`` reads them whenever a class is made, which is a tenth of any command's time.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Mapping
from typing import Any


def describe(section: type, properties: dict[str, dict[str, Any]]) -> None:
    """Add its docstring, if any, to the schema of each property of a section."""
    texts: dict[str, str] = {}
    for base in reversed(section.__mro__):
        if base.__module__.startswith("rlhpc."):
            texts |= docstrings(base)
    for name, schema in properties.items():
        if name in texts:
            schema["description"] = texts[name]


@functools.cache
def docstrings(section: type) -> Mapping[str, str]:
    """Texts directly below the annotated assignments of a class, by field name."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(section))).body
    assert isinstance(definition, ast.ClassDef), definition
    found = {}
    for field, after in zip(definition.body, definition.body[1:], strict=False):
        match field, after:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                found[name] = inspect.cleandoc(text)
    return found
