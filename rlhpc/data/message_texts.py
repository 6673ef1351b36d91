"""Texts of chat messages, and the spellings by which a chat template's rendering contains them."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Messages = Sequence[Mapping[str, Any]]  # each with role and content
Tools = Sequence[Mapping[str, Any]]  # JSON schemas of functions
_REASONING = ("reasoning_content", "reasoning", "thinking")  # fields of a message
_THINK = re.compile(r"(</?think>)")


@dataclass(frozen=True)
class Needle:
    """A text of a message, in each of its spellings."""

    what: str
    forms: tuple[str, ...]
    reasoning: bool = False


def mark(number: int | str) -> str:
    """A word that occurs in no text."""
    return f"zqj{number}kxv"


def needles(message: Mapping[str, Any]) -> Iterator[Needle]:
    """Texts of a message that a rendering must contain, without white space at their ends."""
    for name in _REASONING:
        if isinstance(message.get(name), str):
            yield from _needle(name, message[name], reasoning=True)
    parts = _THINK.split(message.get("content") or "") if message["role"] == "assistant" else [message["content"]]
    thought = len(parts) - 1 - parts[::-1].index("</think>") if "</think>" in parts else 0
    for index, part in enumerate(parts):
        if not _THINK.fullmatch(part):
            yield from _needle("the reasoning" if index < thought else "the content", part, reasoning=index < thought)
    for call in message.get("tool_calls") or ():
        called = call.get("function", call)
        yield from _needle("a tool call", called.get("name"))
        for leaf in _leaves(arguments_of(called)):
            yield from _needle("a tool call's arguments", leaf)


def _needle(what: str, value: Any, *, reasoning: bool = False) -> Iterator[Needle]:
    found = forms(value)
    if found[0]:
        yield Needle(what, found, reasoning)


def forms(value: Any) -> tuple[str, ...]:
    """Spellings of a value: as it is, and in JSON with and without Unicode."""
    if isinstance(value, str):
        text = value.strip()
        return text, *(json.dumps(text, ensure_ascii=flag)[1:-1] for flag in (False, True))
    return json.dumps(value), str(value)


def find(text: str, spellings: Sequence[str], start: int) -> int | None:
    """End of the first place in ``text`` with one of the spellings, from ``start``; None without any."""
    found = [(place, place + len(form)) for form in spellings if (place := text.find(form, start)) >= 0]
    return min(found)[1] if found else None


def tool_name(tool: Mapping[str, Any]) -> str:
    """Name in a tool's schema."""
    called = tool.get("function", tool)
    return str(called.get("name", "") if isinstance(called, Mapping) else "")


def arguments_of(called: Mapping[str, Any]) -> Any:
    """Arguments of a call, parsed from JSON text where they are one."""
    arguments = called.get("arguments")
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except (ValueError, RecursionError):
            return arguments
        return parsed if isinstance(parsed, dict) else arguments
    return arguments


def calls_of(message: Mapping[str, Any], form: str, empty: str | None) -> Mapping[str, Any]:
    """The message with its calls' arguments as ``form``, mapping or text, and ``empty`` for no content."""
    calls = []
    for call in message["tool_calls"]:
        called = call.get("function", call)
        arguments = arguments_of(called)
        if form == "text" and not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        passed = {**called, "arguments": arguments} if "arguments" in called else dict(called)
        calls.append({"type": "function", **call, "function": passed} if "function" in call else passed)
    content = message.get("content") or empty
    return {**message, "content": content, "tool_calls": calls}


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        for name, field in value.items():
            yield name
            yield from _leaves(field)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _leaves(item)
    elif value is not None:
        yield value


def marked(messages: Messages) -> tuple[list[dict[str, Any]], tuple[Any, ...]]:
    """The messages with marks instead of texts, and their shape, which is equal where these are."""
    numbers = itertools.count()

    def text(value: str) -> str:
        return "".join(
            part if _THINK.fullmatch(part) or not part.strip() else mark(next(numbers)) for part in _THINK.split(value)
        )

    def message_of(message: Mapping[str, Any]) -> dict[str, Any]:
        made = dict(message)
        for name in ("content", *_REASONING):
            if isinstance(made.get(name), str):
                made[name] = text(made[name])
        if made.get("tool_calls"):
            made["tool_calls"] = [_marked_call(call, text) for call in made["tool_calls"]]
        return made

    made = [message_of(message) for message in messages]
    return made, tuple(_shape(message) for message in made)


def _shape(message: Mapping[str, Any]) -> tuple[Any, ...]:
    texts = tuple(str(message.get(name)) for name in ("role", "content", *_REASONING))
    kinds = tuple(
        type(call.get("function", call).get("arguments")).__name__ for call in message.get("tool_calls") or ()
    )
    return texts, kinds, tuple(sorted(message))


def _marked_call(call: Mapping[str, Any], text: Any) -> dict[str, Any]:
    def of(called: Mapping[str, Any]) -> dict[str, Any]:
        made = {**called, "name": text(str(called.get("name", "")))}
        if "arguments" in called:
            arguments = {text("key"): text("value")}
            made["arguments"] = json.dumps(arguments) if isinstance(called["arguments"], str) else arguments
        return made

    return {**call, "function": of(call["function"])} if "function" in call else of(call)
