"""Base class of all sections, their number types, and the descriptions of their keys."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from rlhpc.core.redaction import hide

if TYPE_CHECKING:
    from pydantic import GetJsonSchemaHandler

# Above any use, and below what a search for divisors or a float could not take.
_MOST = 10**9
PositiveInt = Annotated[int, Field(ge=1, le=_MOST)]
NonNegativeInt = Annotated[int, Field(ge=0, le=_MOST)]
PositiveSeconds = Annotated[float, Field(gt=0, le=_MOST)]
NonNegativeSeconds = Annotated[float, Field(ge=0, le=_MOST)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(gt=0, le=1)]
Share = Annotated[float, Field(ge=0, le=1)]
ImportPath = Annotated[str, Field(pattern=r"^[\w.]+:\w+(\.\w+)*$")]  # package.module:attribute
# A file's name in one folder: not a path, not . or .., and short enough for what is added to it.
FileName = Annotated[str, Field(pattern=r"^[\w.-]*[\w-][\w.-]*$", max_length=128)]


class Section(BaseModel):
    """A frozen group of keys; an unknown key is an error. Its representation shows no secrets."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, hide_input_in_errors=True)

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: Any, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        schema = handler(core_schema)
        describe(cls, handler.resolve_ref_schema(schema).get("properties", {}))
        return schema

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        for name, value in super().__repr_args__():
            yield name, hide(value, name or "")[0]


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
