"""What the policy asks of tools, and what is done for it in a tool's process. Free of torch."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rlhpc.core.errors import one_line
from rlhpc.core.imports import import_attribute
from rlhpc.rewards.calls import Entry, Failure

LOADER = "rlhpc.rollout.tool_calls:load_tool"
_SHOWN = 300
_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


@dataclass(frozen=True)
class ToolCall:
    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Answer:
    """A tool's, as text."""

    text: str


def parse_calls(text: str) -> list[ToolCall | Failure]:
    """The calls of a turn in the form of Hermes and Qwen, ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``."""
    return [_parse(body) for body in _CALL.findall(text)]


def _parse(body: str) -> ToolCall | Failure:
    try:
        call = json.loads(body)
    except (ValueError, RecursionError) as error:
        return Failure("result", f"the call is no JSON ({error})")
    name = call.get("name") if isinstance(call, dict) else None
    arguments = call.get("arguments", {}) if isinstance(call, dict) else None
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return Failure("result", 'a call is {"name": "…", "arguments": {…}}')
    return ToolCall(name, arguments)


def load_tool(entry: Entry) -> Callable[[Mapping[str, Any]], Answer | Failure]:
    """The tool as a function of what the policy gives, which never raises. ``entry.arguments`` has the tool's own
    ``arguments`` and ``most_characters``."""
    function = import_attribute(entry.path, entry.where)
    fixed, most = entry.arguments["arguments"], entry.arguments["most_characters"]

    def call(given: Mapping[str, Any]) -> Answer | Failure:
        try:
            result = function(**given, **fixed)
            text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)
        except BaseException as error:  # a tool may raise anything, SystemExit too
            return Failure("raised", f"raised {one_line(f'{type(error).__name__}: {error}')[:_SHOWN]}")
        if len(text) > most:
            return Failure("result", f"the answer has {len(text)} characters, too many to be shown")
        return Answer(text)

    return call
