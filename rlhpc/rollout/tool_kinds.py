"""Resolves the configured tools: functions, or methods of objects that belong to one conversation each."""

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
_INFO = "extra_info"  # passed to constructors with a parameter of this name


@dataclass(frozen=True)
class Tool:
    """A tool: ``method`` of the class at import path ``owner``, or ``function`` itself without an owner."""

    section: ToolSection
    where: str
    function: Callable[..., Any]
    owner: str | None = None
    method: str | None = None

    @property
    def kind(self) -> str:
        """Key that is equal for tools of the same object."""
        known = json.dumps(self.section.arguments, sort_keys=True, default=str)
        return f"{self.owner} {known}" if self.owner else f"{self.section.name}"

    def entry(self, most_characters: int) -> Entry:
        """The tool as worker processes receive it."""
        arguments = {"arguments": self.section.arguments, "most_characters": most_characters}
        where = f"{self.where}.function"
        if self.owner is None:
            return Entry(self.section.function, arguments, where, LOADER)
        parameters = inspect.signature(import_attribute(self.owner, where)).parameters
        wants = _INFO in parameters and _INFO not in self.section.arguments
        return Entry(self.owner, {**arguments, _INFO: wants}, where, STATE_LOADER)


def find_tools(sections: Sequence[ToolSection]) -> list[Tool]:
    """The configured tools; raises a UserError for one that cannot be called."""
    return [_find(section, f"rollout.tools.{index}") for index, section in enumerate(sections)]


def _find(section: ToolSection, where: str) -> Tool:
    found = import_attribute(section.function, f"{where}.function")
    if isinstance(found, type):
        tool = Tool(section, where, inspect.getattr_static(found, "__call__"), section.function, "__call__")
        if not inspect.isfunction(tool.function):
            raise UserError(
                f"{section.function!r} is a class without a method __call__",
                where=f"{where}.function",
                remedy=f"add one, or name another of its methods, such as {section.function}.look_up",
            )
        return _checked(tool, found)
    owner, _, method = section.function.rpartition(".")
    if ":" in owner and isinstance(made := import_attribute(owner, f"{where}.function"), type):
        static = inspect.getattr_static(made, method)
        if inspect.isfunction(static):
            return _checked(Tool(section, where, static, owner, method), made)
    if not callable(found):
        raise UserError(
            f"{section.function!r} is not callable", where=f"{where}.function", remedy="name a function or a class"
        )
    return Tool(section, where, found)


def _checked(tool: Tool, made: type) -> Tool:
    """The tool, if its class's constructor accepts the arguments; else a UserError."""
    signature = inspect.signature(made)
    given = {_INFO: None} if _INFO in signature.parameters else {}
    try:
        signature.bind(**{**given, **tool.section.arguments})
    except TypeError as error:
        raise UserError(
            f"{tool.owner} cannot be created with {', '.join(tool.section.arguments) or 'no arguments'} ({error})",
            where=f"{tool.where}.arguments",
            remedy="make them match the constructor's parameters",
        ) from None
    return tool


def tool_schemas(sections: Sequence[ToolSection]) -> list[Schema]:
    """Schema of each tool for the chat template: its name, docstring and parameters."""
    return [_schema(tool) for tool in find_tools(sections)]


def _schema(tool: Tool) -> Schema:
    from transformers.utils import get_json_schema

    path, where = tool.section.function, f"{tool.where}.function"
    try:
        schema: Schema = get_json_schema(tool.function)
    except Exception as error:  # transformers raises several types
        raise UserError(
            f"no schema can be made of {path} ({one_line(str(error))[:200]})",
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
    """Removes the fixed arguments, which the policy does not pass."""
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
