"""Parses the policy's tool calls, and executes them in worker processes. Free of torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rlhpc.core.errors import one_line
from rlhpc.core.imports import import_attribute
from rlhpc.rewards.calls import Entry, Failure

LOADER = "rlhpc.rollout.tool_calls:load_tool"
STATE_LOADER = "rlhpc.rollout.tool_calls:load_class"
_SHOWN = 300
_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


@dataclass(frozen=True)
class ToolCall:
    """A call as the policy wrote it."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class ToolAnswer:
    """A tool's answer, as text."""

    text: str


@dataclass(frozen=True)
class MethodCall:
    """Call of a method of a conversation's own object. If there is none, it is created, with ``extra_info`` if its
    constructor takes it, and the ``past`` calls are repeated on it. ``method`` None closes the object."""

    conversation: int
    method: str | None
    given: Mapping[str, Any]  # the call's arguments
    past: tuple[tuple[str, Mapping[str, Any]], ...]
    extra_info: Mapping[str, Any]


def parse_calls(text: str) -> list[ToolCall | Failure]:
    """The calls of a turn, in Hermes' and Qwen's format: ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``."""
    calls: list[ToolCall | Failure] = []
    start = text.find(_OPEN)
    while start >= 0 and (end := text.find(_CLOSE, start)) >= 0:
        calls.append(_parse(text[start + len(_OPEN) : end]))
        start = text.find(_OPEN, end)
    return calls


def _parse(body: str) -> ToolCall | Failure:
    try:
        call = json.loads(body)
    except (ValueError, RecursionError) as error:
        return Failure("result", f"the call is not valid JSON ({error})")
    name = call.get("name") if isinstance(call, dict) else None
    arguments = call.get("arguments", {}) if isinstance(call, dict) else None
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return Failure("result", 'a call must be {"name": "…", "arguments": {…}}')
    return ToolCall(name, arguments)


def load_tool(entry: Entry) -> Callable[[Mapping[str, Any]], ToolAnswer | Failure]:
    """The tool as a function of the policy's arguments, which never raises. ``entry.arguments`` holds the tool's fixed
    ``arguments`` and ``most_characters``, the limit of its answers."""
    function = import_attribute(entry.path, entry.where)
    fixed, most = entry.arguments["arguments"], entry.arguments["most_characters"]
    return lambda given: _answered(lambda: function(**given, **fixed), most)


def load_class(entry: Entry) -> Callable[[MethodCall], ToolAnswer | Failure]:
    """A class with one object per conversation, as a function of method calls, which never raises.

    ``entry.arguments`` holds the constructor's ``arguments``, ``most_characters``, and whether it takes ``extra_info``.
    """
    owner = import_attribute(entry.path, entry.where)
    fixed, most = entry.arguments["arguments"], entry.arguments["most_characters"]
    wants_info = entry.arguments["extra_info"]
    objects: dict[int, Any] = {}

    def create(call: MethodCall) -> Any:
        created = owner(**fixed, **({"extra_info": call.extra_info} if wants_info else {}))
        for method, given in call.past:
            getattr(created, method)(**given)
        return created

    def invoke(call: MethodCall) -> Any:
        if call.method is None:
            close = getattr(objects.pop(call.conversation, None), "close", None)
            return close() if close is not None else None
        if call.conversation not in objects:
            objects[call.conversation] = create(call)
        return getattr(objects[call.conversation], call.method)(**call.given)

    return lambda call: _answered(lambda: invoke(call), most)


def _answered(ask: Callable[[], Any], most: int) -> ToolAnswer | Failure:
    """Outcome of a call of the user's code, as text of at most ``most`` characters."""
    try:
        result = ask()
        text = _whole(result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str))
    except BaseException as error:  # a tool may raise anything, including SystemExit
        return Failure("raised", _whole(f"raised {one_line(f'{type(error).__name__}: {error}')[:_SHOWN]}"))
    if len(text) > most:
        return Failure("result", f"the answer has {len(text)} characters, which is too long")
    return ToolAnswer(text)


def _whole(text: str) -> str:
    """The text without lone surrogates, which a policy can write in JSON but no tokenizer accepts."""
    return text.encode("utf-8", "replace").decode()
