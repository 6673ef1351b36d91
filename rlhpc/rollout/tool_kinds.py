"""What the configured tools are: functions, or methods of objects that each conversation has of its own."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rlhpc.config.rollout import ToolSection
from rlhpc.core.errors import UserError, one_line
from rlhpc.core.imports import import_attribute
from rlhpc.rewards.calls import Entry
from rlhpc.rollout.tool_calls import LOADER, STATE_LOADER

Schema = dict[str, Any]
_INFO = "extra_info"  # given to a constructor that has a parameter of the name


@dataclass(frozen=True)
class Tool:
    """``method`` of the class at import path ``owner``, or ``function`` itself, of no owner."""

    section: ToolSection
    where: str
    function: Callable[..., Any]
    owner: str | None = None
    method: str | None = None

    @property
    def kind(self) -> str:
        """Equal for tools of the same object."""
        known = json.dumps(self.section.arguments, sort_keys=True, default=str)
        return f"{self.owner} {known}" if self.owner else f"{self.section.name}"

    def entry(self, most_characters: int) -> Entry:
        """For the processes that call it."""
        arguments = {"arguments": self.section.arguments, "most_characters": most_characters}
        where = f"{self.where}.function"
        if self.owner is None:
            return Entry(self.section.function, arguments, where, LOADER)
        parameters = inspect.signature(import_attribute(self.owner, where)).parameters
        wants = _INFO in parameters and _INFO not in self.section.arguments
        return Entry(self.owner, {**arguments, _INFO: wants}, where, STATE_LOADER)


def find_tools(sections: Sequence[ToolSection]) -> list[Tool]:
    """A UserError for what is no tool."""
    return [_find(section, f"rollout.tools.{index}") for index, section in enumerate(sections)]


def _find(section: ToolSection, where: str) -> Tool:
    found = import_attribute(section.function, f"{where}.function")
    if isinstance(found, type):
        tool = Tool(section, where, inspect.getattr_static(found, "__call__"), section.function, "__call__")
        if not inspect.isfunction(tool.function):
            raise UserError(
                f"{section.function!r} is a class whose objects cannot be called",
                where=f"{where}.function",
                remedy=f"give it a method __call__, or name one of its methods, as {section.function}.look_up",
            )
        return _checked(tool, found)
    owner, _, method = section.function.rpartition(".")
    if ":" in owner and isinstance(made := import_attribute(owner, f"{where}.function"), type):
        static = inspect.getattr_static(made, method)
        if inspect.isfunction(static):
            return _checked(Tool(section, where, static, owner, method), made)
    if not callable(found):
        raise UserError(
            f"{section.function!r} is not a function", where=f"{where}.function", remedy="name one, or a class"
        )
    return Tool(section, where, found)


def _checked(tool: Tool, made: type) -> Tool:
    """The class's constructor takes the arguments."""
    signature = inspect.signature(made)
    given = {_INFO: None} if _INFO in signature.parameters else {}
    try:
        signature.bind(**{**given, **tool.section.arguments})
    except TypeError as error:
        raise UserError(
            f"{tool.owner} cannot be made with {', '.join(tool.section.arguments) or 'nothing'} ({error})",
            where=f"{tool.where}.arguments",
            remedy="make its parameters and these agree",
        ) from None
    return tool


def tool_schemas(sections: Sequence[ToolSection]) -> list[Schema]:
    """What the policy is told of each tool: its name, docstring and parameters, in the form that templates take."""
    return [_schema(tool) for tool in find_tools(sections)]


def _schema(tool: Tool) -> Schema:
    from transformers.utils import get_json_schema

    path, where = tool.section.function, f"{tool.where}.function"
    try:
        schema: Schema = get_json_schema(tool.function)
    except Exception as error:  # transformers has several
        raise UserError(
            f"the policy cannot be told of {path} ({one_line(str(error))[:200]})",
            where=where,
            remedy="give every parameter a type, and a line under 'Args:' of the docstring",
        ) from None
    described = schema["function"]
    if tool.owner is None:
        _hide(described["parameters"], tool)
    described["name"] = tool.section.name
    described.pop("return", None)
    return schema


def _hide(parameters: dict[str, Any], tool: Tool) -> None:
    """Leave out what the policy does not give."""
    fixed = tool.section.arguments
    unknown = set(fixed) - set(parameters["properties"])
    if unknown:
        raise UserError(
            f"{tool.section.function} has no parameter {sorted(unknown)[0]!r}",
            where=f"{tool.where}.arguments",
            remedy=f"it has {', '.join(parameters['properties']) or 'none'}",
        )
    for name in fixed:
        del parameters["properties"][name]
    if "required" in parameters:
        parameters["required"] = [name for name in parameters["required"] if name not in fixed]
