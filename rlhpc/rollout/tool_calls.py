"""What the policy asks of tools, and what is done for it in a tool's process. Free of torch."""

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
    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class ToolAnswer:
    """A tool's, as text."""

    text: str


@dataclass(frozen=True)
class MethodCall:
    """Of the object that a conversation has of a class. Where there is none it is made, with ``extra_info`` if it takes
    that, and ``past`` is called on it, methods with their arguments; ``method`` None: the object is closed."""

    conversation: int
    method: str | None
    given: Mapping[str, Any]
    past: tuple[tuple[str, Mapping[str, Any]], ...]
    extra_info: Mapping[str, Any]


def parse_calls(text: str) -> list[ToolCall | Failure]:
    """The calls of a turn in the form of Hermes and Qwen, ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``."""
    calls, start = [], text.find(_OPEN)
    while start >= 0 and (end := text.find(_CLOSE, start)) >= 0:
        calls.append(_parse(text[start + len(_OPEN) : end]))
        start = text.find(_OPEN, end)
    return calls


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


def load_tool(entry: Entry) -> Callable[[Mapping[str, Any]], ToolAnswer | Failure]:
    """The tool as a function of what the policy gives, which never raises. ``entry.arguments`` has the tool's own
    ``arguments`` and ``most_characters``."""
    function = import_attribute(entry.path, entry.where)
    fixed, most = entry.arguments["arguments"], entry.arguments["most_characters"]
    return lambda given: _answered(lambda: function(**given, **fixed), most)


def load_class(entry: Entry) -> Callable[[MethodCall], ToolAnswer | Failure]:
    """The objects of a class, one for each conversation, as a function of calls, which never raises.

    ``entry.arguments`` as for ``load_tool``, the constructor's, and whether it takes ``extra_info``.
    """
    made = import_attribute(entry.path, entry.where)
    fixed, most = entry.arguments["arguments"], entry.arguments["most_characters"]
    wants_info = entry.arguments["extra_info"]
    objects: dict[int, Any] = {}

    def renewed(call: MethodCall) -> Any:
        found = made(**fixed, **({"extra_info": call.extra_info} if wants_info else {}))
        for method, given in call.past:
            getattr(found, method)(**given)
        return found

    def invoke(call: MethodCall) -> Any:
        if call.method is None:
            close = getattr(objects.pop(call.conversation, None), "close", None)
            return close() if close is not None else None
        if call.conversation not in objects:
            objects[call.conversation] = renewed(call)
        return getattr(objects[call.conversation], call.method)(**call.given)

    return lambda call: _answered(lambda: invoke(call), most)


def _answered(ask: Callable[[], Any], most: int) -> ToolAnswer | Failure:
    """What comes of a call of the user's, as text of at most so many characters."""
    try:
        result = ask()
        text = _whole(result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str))
    except BaseException as error:  # a tool may raise anything, SystemExit too
        return Failure("raised", _whole(f"raised {one_line(f'{type(error).__name__}: {error}')[:_SHOWN]}"))
    if len(text) > most:
        return Failure("result", f"the answer has {len(text)} characters, too many to be shown")
    return ToolAnswer(text)


def _whole(text: str) -> str:
    """Without halves of surrogate pairs, which a policy can write in JSON and no tokenizer takes."""
    return text.encode("utf-8", "replace").decode()
