"""Renders conversations by a chat template, a program of others that may drop, move or rewrite messages.

What a template does is found by rendering texts that occur nowhere else (marks).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from typing import Any

from rlhpc.core.errors import UserError, one_line
from rlhpc.data.cpu_limit import CpuTimeExceeded, cpu_limit
from rlhpc.data.message_texts import Messages, Tools, calls_of, find, forms, mark, marked, needles, tool_name

RENDER_SECONDS = 30.0  # CPU time to render one conversation, which takes milliseconds
_ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
_LEADING = ("system", "developer")  # roles whose messages templates move
_MARKUP = re.compile(r"think|reason|tool.?calls?\b", re.IGNORECASE)  # names of tokens of assistant turns
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_KEY = "data.chat_template"
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Chat:
    """A conversation with its own tools; without any, the run's tools apply.

    ``place``: its file and row. ``sampled``: number of last messages that the policy or its tools wrote in the run.
    """

    messages: Messages
    tools: Tools | None = None
    place: str = ""
    sampled: int = 0


@dataclass(frozen=True)
class Turn:
    """Frame of an assistant's turn. ``header`` begins it; ``missing`` is added by the generation prompt only;
    ``end`` is the name of the token that ends a last one, ``stop`` a text that does without one, ``middle`` the name of
    the token that ends any other. ``follows``: what ends it is the first token of the next turn."""

    header: str = ""
    missing: str = ""
    end: str = ""
    stop: str = ""
    middle: str = ""
    follows: bool = False


class _Rejected(UserError):
    """Raised by the template itself."""


class ChatTemplate:
    """A tokenizer's template. ``unrendered`` counts conversations with sampled messages that it renders in part."""

    def __init__(self, inner: Any, arguments: Mapping[str, Any], moment: datetime, ends: Sequence[str]) -> None:
        """``inner``: transformers' tokenizer; ``arguments``: variables of the template; ``moment``: its present time;
        ``ends``: names of the model's end tokens."""
        self._inner, self._arguments = inner, {"strftime_now": moment.strftime, **arguments}
        self._model_ends = tuple(ends)
        self.unrendered = 0
        self._said: set[str] = set()
        self._lost_marks: dict[Any, tuple[int, str] | None] = {}

    def render(self, messages: Messages, tools: Tools | None = None, *, generate: bool = False) -> str:
        """Messages as they are; ``generate``: up to where the model's turn begins. Raises a UserError."""
        from jinja2 import TemplateError

        try:
            with cpu_limit(RENDER_SECONDS):
                text = self._inner.apply_chat_template(
                    list(messages),
                    tools=list(tools) if tools else None,
                    tokenize=False,
                    add_generation_prompt=generate,
                    **self._arguments,
                )
        except CpuTimeExceeded:
            raise UserError(
                f"the chat template takes more than {RENDER_SECONDS:g} s for {str(messages)[:80]}",
                where=_KEY,
                remedy="use one whose loops end",
            ) from None
        except (TemplateError, ValueError, TypeError) as error:
            raise _Rejected(
                f"the chat template rejects {str(messages)[:80]} ({one_line(str(error))[:200]})",
                where=_KEY,
                remedy="correct the messages or data.template_arguments, or set it to false",
            ) from None
        return str(text)

    def prompt(self, chat: Chat, *, continues: bool = False) -> str:
        """Text up to where the response begins; ``continues``: a final assistant message is its beginning."""
        chat = self.prepared(chat)
        if continues and chat.messages[-1]["role"] == "assistant":
            return self._continued(chat)
        return self._checked(chat, generate=True)

    def conversation(self, chat: Chat) -> str:
        """Text of a whole conversation."""
        return self._checked(self.prepared(chat))

    def prepared(self, chat: Chat) -> Chat:
        """The conversation as the template takes it: without names of control tokens, calls in its form."""
        messages = [self._with_calls(message) for message in self.defused(chat.messages, chat.place)]
        return replace(chat, messages=messages, tools=self.defused(chat.tools, chat.place))

    def _continued(self, chat: Chat) -> str:
        """Text of a prompt whose last message begins the response. Its reasoning stays open."""
        *earlier, last = chat.messages
        begun = opened = self._checked(replace(chat, messages=earlier), generate=True)
        content, here = str(last["content"]), mark(0)
        whole = self.render([*earlier, {**last, "content": here}], chat.tools)
        if here in whole and content.rfind("<think>") <= content.rfind("</think>"):
            begun = whole[: whole.rfind(here)]
        given = next((n for n in range(len(content), 0, -1) if opened.endswith(content[:n])), 0)
        return begun + content[given if "<think>" in content[:given] and begun == opened else 0 :]

    # ---- every message's text is in the rendering

    def _checked(self, chat: Chat, *, generate: bool = False, trained: Sequence[int] = ()) -> str:
        """The rendering; raises a UserError if a message's text is not in it. Reasoning may be left out of messages
        that are not ``trained``."""
        text = self.render(chat.messages, chat.tools, generate=generate)
        lost = self._lost_marked(chat, trained, generate=generate) or self._lost(chat, text, trained)
        if lost is None:
            return text
        index, what = lost
        if index >= len(chat.messages) - chat.sampled:
            self.unrendered += 1
            return text
        where, remedy = chat.place or _KEY, "or another data.chat_template"
        if index < 0:
            raise UserError(
                f"the chat template does not render tools ({what})", where=where, remedy=f"use none, {remedy}"
            )
        remedy = (
            f"use a role that it renders ({', '.join(self.roles)}), {remedy}"
            if what == "the content"
            else f"remove it, {remedy}"
        )
        role = chat.messages[index]["role"]
        raise UserError(
            f"the chat template does not render {what} of message {index + 1}, whose role is {role!r}",
            where=where,
            remedy=remedy,
        )

    def _lost(self, chat: Chat, text: str, trained: Sequence[int]) -> tuple[int, str] | None:
        """Index of the first message of which the text lacks something, and what; -1 for tools."""
        for tool in chat.tools or ():
            if tool_name(tool) and find(text, forms(tool_name(tool)), 0) is None:
                return -1, tool_name(tool)
        at = 0
        for index, message in enumerate(chat.messages):
            leads, end = message["role"] in _LEADING, at
            for needle in needles(message):
                place = find(text, needle.forms, 0 if leads else at)
                if place is None and not (needle.reasoning and index not in trained):
                    return index, needle.what
                if place is None:
                    self._say("leaves out the reasoning of earlier turns")
                elif not leads and not needle.reasoning:  # which may be left out here and found further on
                    end = max(end, place)
            at = end
        return None

    def _lost_marked(self, chat: Chat, trained: Sequence[int], *, generate: bool) -> tuple[int, str] | None:
        """As ``_lost``, with marks instead of texts: a short text is found anywhere."""
        messages, shape = marked(chat.messages)
        key = shape, bool(chat.tools), generate, tuple(trained)
        if key not in self._lost_marks:
            try:
                text = self.render(messages, chat.tools, generate=generate)
                self._lost_marks[key] = self._lost(replace(chat, messages=messages), text, trained)
            except _Rejected:  # wants other texts than marks
                self._lost_marks[key] = None
        return self._lost_marks[key]

    def _say(self, what: str, place: str = "") -> None:
        """Logs once what the template does to messages."""
        if what not in self._said:
            self._said.add(what)
            _log.warning("%sthe chat template %s", f"{place}: " if place else "", what)

    @cached_property
    def roles(self) -> tuple[str, ...]:
        """The usual roles that the template renders."""
        asks, here = {"role": "user", "content": "a question"}, mark(0)
        found = []
        for role in _ROLES:
            message = {"role": role, "content": here, "tool_call_id": _identity(0)}
            tries = [[message], [message, asks], [asks, message], [asks, *_called(mark(1)), message]]
            if any(here in (self._try(messages) or "") for messages in tries):
                found.append(role)
        return tuple(found)

    def _try(self, messages: Messages, tools: Tools | None = None, *, generate: bool = False) -> str | None:
        """A rendering; None if the template rejects the messages."""
        try:
            return self.render(messages, tools, generate=generate)
        except _Rejected:
            return None

    # ---- calls, in the form that the template takes

    @cached_property
    def _call_form(self) -> tuple[str, str | None]:
        """Form of arguments and of a missing content: (mapping or text, empty or null)."""
        asks = {"role": "user", "content": "a question"}
        for form in (("mapping", ""), ("text", ""), ("mapping", None), ("text", None)):
            called = [calls_of(message, *form) for message in _called(mark(1))]
            text = self._try([asks, *called]) or ""
            if mark(1) in text and mark(2) in text and "{'key'" not in text:  # Python's form of a mapping
                return form
        return "mapping", ""

    def _with_calls(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        return calls_of(message, *self._call_form) if message.get("tool_calls") else message

    # ---- control tokens come from the template alone

    def defused(self, value: Any, place: str = "") -> Any:
        """Messages, schemas or texts with a space in the names of control tokens, so that they are encoded as texts."""
        if isinstance(value, str):
            while broken := self.control.sub(lambda found: f"{found[0][0]} {found[0][1:]}", value):
                if broken == value:
                    break
                self._say(f"alone may write control tokens: a space breaks up the name of one in {value[:80]!r}", place)
                value = broken
            return value
        if isinstance(value, Mapping):
            return {self.defused(name, place): self.defused(field, place) for name, field in value.items()}
        if isinstance(value, list | tuple):
            return [self.defused(item, place) for item in value]
        return value

    @cached_property
    def control(self) -> re.Pattern[str]:
        """Names of control tokens: added ones that are special, or that the template writes around the texts of
        systems, users and tools."""
        added = self._inner.added_tokens_decoder.values()
        names = {token.content for token in added if token.special} | set(self._inner.all_special_tokens)
        around = self._around_texts()
        names |= {token.content for token in added if token.content in around and not _MARKUP.search(token.content)}
        visible = sorted((name for name in names if len(name.strip("▁ \t\r\n")) > 1), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, visible)) or r"(?!)")

    def _around_texts(self) -> str:
        """Text that the template writes before and after texts of each role."""
        system, asks, answer, more = (
            {"role": role, "content": mark(i)} for i, role in enumerate(("system", "user", "assistant", "user"))
        )
        result = _results(mark(4))
        called = _called(mark(5))
        found = []
        for messages in ([system, asks], [asks, answer, more], [asks, *called, *result], [asks, answer, *result]):
            found += [self._try(messages, generate=generate) or "" for generate in (False, True)]
        return re.sub(mark(r"\d+"), "", "".join(found))

    # ---- turns of the assistant

    @cached_property
    def turn(self) -> Turn:
        """Frame of an assistant's turn that calls no tool."""
        asks, answer, more = ({"role": r, "content": mark(i)} for i, r in enumerate(("user", "assistant", "user")))
        asked, opened = self._try([asks]) or "", self._try([asks], generate=True) or ""
        whole, longer = self._try([asks, answer]) or "", self._try([asks, answer, more]) or ""
        before, found, tail = whole.partition(mark(1))
        if not found or mark(0) not in opened:
            return Turn()
        shared = self._shared(opened, before)
        last = self.control.search(tail)
        names = self.control.findall(longer.partition(mark(1))[2].partition(mark(2))[0])
        end = last[0] if last else "" if tail.strip() else next(iter(names), "")  # or the next turn's first token
        return Turn(
            header=opened[self._shared(opened, asked) : shared],
            missing=opened[shared:],
            end=end,
            stop="" if last else tail.strip(),
            middle=names[0] if len(names) > 1 else end,
            follows=bool(end) and last is None,
        )

    @cached_property
    def call_end(self) -> str:
        """Name of the token that ends a turn with a call; that of any turn if the template writes none."""
        asks, result = {"role": "user", "content": mark(0)}, _results(mark(3))
        called = [self._with_calls(message) for message in _called(mark(1))]
        whole, longer = self._try([asks, *called]) or "", self._try([asks, *called, *result]) or ""
        names = self.control.findall(whole.rpartition(mark(2))[2]) if mark(2) in whole else []
        if not names and self.turn.follows:
            names = self.control.findall(longer.rpartition(mark(2))[2].partition(mark(3))[0])[:1]
        return names[-1] if names else self.turn.end

    @cached_property
    def ends(self) -> tuple[str, ...]:
        """Names of tokens, and texts, that end a turn; the template's come first."""
        names = (self.turn.end, self.turn.stop, self.call_end, *self._model_ends)
        return tuple(dict.fromkeys(name for name in names if name))

    def turns(self, chat: Chat, *, every: bool) -> tuple[str, list[tuple[int, int]]]:
        """Text of a conversation that ends with the assistant, and the characters of its last turn, or of every one,
        that are trained on: from where a response begins to the template's end of the turn."""
        chat = self.prepared(chat)
        turns = [i for i, message in enumerate(chat.messages) if message["role"] == "assistant"]
        turns = turns if every else turns[-1:]
        if every and _GENERATION.search(str(self._inner.chat_template)):
            self._checked(chat, trained=turns)
            return self._tagged(chat)
        text = self._checked(chat, trained=turns)
        if self.turn.missing:
            self._say(f"renders answers without {self.turn.missing!r}, which its generation prompt adds")
        spans: list[tuple[int, int]] = []
        for index in turns:
            start = self._start(chat, index, text)
            text, end = self._end(chat, index, text, start)
            spans.append((start, end))
        return text, spans

    def _tagged(self, chat: Chat) -> tuple[str, list[tuple[int, int]]]:
        """Text of a conversation, and its characters between ``{% generation %}`` tags."""
        from transformers.utils.chat_template_utils import render_jinja_template

        texts, spans = render_jinja_template(
            conversations=[list(chat.messages)],
            tools=list(chat.tools) if chat.tools else None,
            chat_template=self._inner.get_chat_template(tools=chat.tools),
            return_assistant_tokens_mask=True,
            **{**self._inner.special_tokens_map, **self._arguments},
        )
        return texts[0], [(start, end) for start, end in spans[0]]

    def _start(self, chat: Chat, index: int, text: str) -> int:
        """Place in the text at which the response begins that message ``index`` is."""
        least = self._end_of_texts(chat, index, text)
        common = self._shared(text, self.render(chat.messages[:index], chat.tools, generate=True))
        if common >= least:
            return common
        messages, _ = marked(chat.messages)
        marks = self._try(messages, chat.tools) or ""
        before = self._end_of_texts(replace(chat, messages=messages), index, marks)
        own = [find(marks, needle.forms, before) for needle in needles(messages[index])]
        place = self._header_end(text, least)
        shown = self._header_end(marks, before)
        if place is None or shown is None or any(end is not None and end < shown for end in own):
            raise UserError(
                f"the chat template does not show where message {index + 1} begins",
                where=chat.place or _KEY,
                remedy="use one that keeps earlier messages as they are",
            )
        return place

    def _header_end(self, text: str, start: int) -> int | None:
        """End of the next header of a turn, or of its first lines, which is all that some turns have."""
        header = self.turn.header
        begun = [header[:end] for end in range(len(header), 0, -1) if end == len(header) or header[end - 1] == "\n"]
        found = [(place, -len(line)) for line in begun if (place := text.find(line, start)) >= 0]
        return min(found)[0] - min(found)[1] if found else None

    def _end(self, chat: Chat, index: int, text: str, start: int) -> tuple[str, int]:
        """The text, and where its turn ends that message ``index`` is; an end that the template writes only before a
        next turn, or not at all, is added to the last one."""
        least = max(start, self._end_of_texts(chat, index + 1, text))
        last = index == len(chat.messages) - 1
        names = self.ends if last else (self.turn.middle, *self.ends)
        found = [(place, -len(name)) for name in names if name and (place := text.find(name, least)) >= 0]
        if found and (last or self._is_ended(chat, index, names)):
            place, length = min(found)
            return text, place - length
        if not last:
            raise UserError(
                f"the chat template does not end message {index + 1}, a turn of the assistant",
                where=chat.place or _KEY,
                remedy="set sft.train_on: last_turn, or use another data.chat_template",
            )
        end = self.call_end if chat.messages[index].get("tool_calls") else self.turn.end
        text = text.rstrip("\n") + (end or self._model_ends[0])
        return text, len(text)

    def _is_ended(self, chat: Chat, index: int, names: Sequence[str]) -> bool:
        """True if the template ends a turn before the next message."""
        messages, _ = marked(chat.messages)
        text = self._try(messages, chat.tools) or ""
        least = self._end_of_texts(replace(chat, messages=messages), index + 1, text)
        later = [find(text, needle.forms, least) for message in messages[index + 1 :] for needle in needles(message)]
        most = min((place for place in later if place is not None), default=len(text))
        return any(name and text.find(name, least, most) >= 0 for name in names)

    def _end_of_texts(self, chat: Chat, count: int, text: str) -> int:
        """End of the texts of the first ``count`` messages in the rendering."""
        at = 0
        for message in chat.messages[:count]:
            shown = (
                [] if message["role"] in _LEADING else [needle for needle in needles(message) if not needle.reasoning]
            )
            found = [find(text, needle.forms, at) for needle in shown]
            at = max([at, *(place for place in found if place is not None)])
        return at

    def _shared(self, text: str, other: str) -> int:
        """Number of first characters that are equal in both, up to the last whole token or line if they part."""
        if text.startswith(other):
            return len(other)
        pairs = enumerate(zip(text, other, strict=False))
        shared = next((i for i, (one, two) in pairs if one != two), min(len(text), len(other)))
        if shared == len(text):
            return shared
        return max((found.end() for found in self._whole.finditer(other, 0, shared)), default=0)

    @cached_property
    def _whole(self) -> re.Pattern[str]:
        """Pieces that are not cut: names of added tokens, and ends of lines."""
        names = sorted((token.content for token in self._inner.added_tokens_decoder.values()), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, [*names, "\n"])))

    def written_call(self, name: str, arguments: Mapping[str, Any]) -> str | None:
        """A turn that calls a tool, as the template writes it; None if it does not."""
        call = {"type": "function", "id": _identity(0), "function": {"name": name, "arguments": dict(arguments)}}
        called = {"role": "assistant", "content": "", "tool_calls": [call]}
        messages: list[dict[str, Any]] = [{"role": "user", "content": "a question"}, called]
        try:
            text, ((start, end),) = self.turns(Chat(messages), every=False)
        except UserError:
            return None
        return text[start:end]

    def between_turns(self, answers: Sequence[str], names: Sequence[str] = ()) -> str:
        """Text from the end of a turn that called the tools ``names`` to where the next one begins."""
        asks, results = {"role": "user", "content": "a question"}, _results(*map(self.defused, answers))
        names = [*map(self.defused, names)] or [mark(1)] * len(answers)
        turns = [_called(*names), _called(names[0]), _said(mark(2))]  # as the template takes it
        problem: UserError | None = None
        for turn in ([self._with_calls(message) for message in messages] for messages in turns):
            try:
                whole = self.render([asks, *turn, *results], generate=True)
            except _Rejected as error:
                problem = error
                continue
            end, longer = (
                whole.rfind(mark(2)) + len(mark(2)),
                self._try([asks, *turn, *results, *_results("another answer")]),
            )
            first = min((place for name in self.ends if (place := whole.find(name, end)) >= 0), default=None)
            shown = [find(whole, forms(answer["content"]), end) for answer in results]
            if mark(2) not in whole or (longer is not None and not longer.startswith(whole[:end])):
                problem = _no_answers("renders a turn differently once tools have answered it")
            elif None in shown:
                problem = _no_answers("does not render tools' answers")
            elif "tool_calls" not in turn[0] or (first is not None and first < min(place or 0 for place in shown)):
                return whole[end if first is None else first :]
        assert problem is not None, "a turn without calls has one"
        raise problem


def _no_answers(wrong: str) -> UserError:
    remedy = "use one that only appends messages of the role tool"
    return UserError(f"the chat template {wrong}", where=_KEY, remedy=remedy)


def _called(*names: str) -> list[dict[str, Any]]:
    """A turn with calls of tools, each with the argument ``mark(2)``."""
    functions = [{"name": name, "arguments": {"key": mark(2)}} for name in names]
    calls = [{"type": "function", "id": _identity(i), "function": of} for i, of in enumerate(functions)]
    return [{"role": "assistant", "content": "", "tool_calls": calls}]


def _identity(number: int) -> str:
    """Identity of a call; nine characters, as Mistral's templates demand."""
    return f"call{number:05}"


def _said(text: str) -> list[dict[str, Any]]:
    return [{"role": "assistant", "content": text}]


def _results(*texts: str) -> list[dict[str, Any]]:
    return [{"role": "tool", "content": text, "tool_call_id": _identity(i)} for i, text in enumerate(texts)]
