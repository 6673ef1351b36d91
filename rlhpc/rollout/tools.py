"""Tools between the policy's turns: called in processes beside the engine, answered in the chat template's words."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from rlhpc.config.rollout import RolloutSection, ToolSection
from rlhpc.core.errors import UserError, one_line
from rlhpc.core.heartbeat import touch
from rlhpc.core.imports import import_attribute
from rlhpc.data.tokenizer import Tokenizer
from rlhpc.rewards.calls import Entry, Failure
from rlhpc.rewards.pool import Call, Pool
from rlhpc.rollout.tool_calls import LOADER, Answer, ToolCall, parse_calls

_CHARACTERS_PER_TOKEN = 16  # no tokenizer has texts of more on average
_LOOK_SECONDS = 0.005

Schema = dict[str, Any]


def tool_schemas(tools: Sequence[ToolSection]) -> list[Schema]:
    """What the policy is told of each tool: its name, docstring and parameters, in the form that templates take."""
    return [_schema(tool, f"rollout.tools.{index}") for index, tool in enumerate(tools)]


def _schema(tool: ToolSection, where: str) -> Schema:
    from transformers.utils import get_json_schema

    function = import_attribute(tool.function, f"{where}.function")
    if not callable(function) or isinstance(function, type):
        raise UserError(f"{tool.function!r} is not a function", where=f"{where}.function", remedy="name one")
    try:
        schema: Schema = get_json_schema(function)
    except Exception as error:  # transformers has several
        raise UserError(
            f"the policy cannot be told of {tool.function} ({one_line(str(error))[:200]})",
            where=f"{where}.function",
            remedy="give every parameter a type, and a line under 'Args:' of the docstring",
        ) from None
    described = schema["function"]
    parameters = described["parameters"]
    unknown = set(tool.arguments) - set(parameters["properties"])
    if unknown:
        raise UserError(
            f"{tool.function} has no parameter {sorted(unknown)[0]!r}",
            where=f"{where}.arguments",
            remedy=f"it has {', '.join(parameters['properties']) or 'none'}",
        )
    for name in tool.arguments:
        del parameters["properties"][name]
    if "required" in parameters:
        parameters["required"] = [name for name in parameters["required"] if name not in tool.arguments]
    described["name"] = tool.name
    described.pop("return", None)
    return schema


@dataclass
class _Turn:
    """The calls of one turn, and the texts that have come."""

    answers: list[str | None]
    places: dict[int, int] = field(default_factory=dict)  # of calls under way


class ToolUse:
    """One engine's tools; a ``Dialogue`` (``rlhpc.rollout.collect``).

    The engine's first rank calls them, and tells the others over ``group`` what they answered. A call that raises,
    hangs or answers too much is answered with an error text.
    """

    def __init__(
        self, section: RolloutSection, tokenizer: Tokenizer, leads: bool, group: dist.ProcessGroup | None = None
    ) -> None:
        """``group``: the engine's ranks, on the host; None for one alone."""
        self._section, self._tokenizer, self._leads, self._group = section, tokenizer, leads, group
        tokenizer.check_tool_turns()
        self._index = {tool.name: index for index, tool in enumerate(section.tools)}
        self._pool = _start_pool(section) if leads else None
        self._turns: dict[int, _Turn] = {}
        self._key_of: dict[int, int] = {}  # of each call under way, its turn's
        self._next = 0
        self._calls = self._failures = 0

    def begin(self, key: int, turn: Sequence[int], number: int) -> bool:
        """See ``Dialogue``. What the last turn calls is not run."""
        if number >= self._section.max_turns:
            return False
        calls = parse_calls(self._tokenizer.decode(turn, special=True))
        if calls and self._pool is not None:
            self._turns[key] = _Turn([None] * len(calls))
            for place, call in enumerate(calls):
                self._call(key, place, call)
        return bool(calls)

    def ready(self) -> dict[int, tuple[int, ...]]:
        """See ``Dialogue``. Collective over the engine's ranks."""
        return self._shared(self._finished)

    def answers(self, all_of_them: bool) -> dict[int, tuple[int, ...]]:
        """See ``Dialogue``. Collective over the engine's ranks."""

        def wait() -> dict[int, tuple[int, ...]]:
            found = self._finished()
            while self._turns and (all_of_them or not found):
                time.sleep(_LOOK_SECONDS)
                touch("tools")
                found |= self._finished()
            return found

        return self._shared(wait)

    def take_counts(self) -> tuple[int, int]:
        """(calls, those of them that failed) since this was asked last, of the engine's first rank."""
        counts, self._calls, self._failures = (self._calls, self._failures), 0, 0
        return counts

    def close(self) -> None:
        """End the processes."""
        if self._pool is not None:
            self._pool.close()

    def _call(self, key: int, place: int, call: ToolCall | Failure) -> None:
        self._calls += 1
        if isinstance(call, ToolCall) and call.name not in self._index:
            call = Failure("result", f"there is no tool {call.name!r:.80}, only {', '.join(self._index)}")
        if isinstance(call, Failure):
            self._turns[key].answers[place] = self._told(call)
            return
        identity, self._next = self._next, self._next + 1
        self._key_of[identity] = key
        self._turns[key].places[identity] = place
        self._pool.submit([Call((identity, self._index[call.name]), call.arguments)])

    def _told(self, outcome: Answer | Failure) -> str:
        if isinstance(outcome, Failure):
            self._failures += 1
            return f"error: {outcome.what}"
        count = self._tokenizer.count(outcome.text)
        if count > self._section.max_tool_answer_tokens:
            return self._told(Failure("result", f"the answer has {count} tokens, too many to be shown"))
        return outcome.text

    def _finished(self) -> dict[int, tuple[int, ...]]:
        """Turns whose last call has been answered, as tokens."""
        for (identity, _), outcome in self._pool.ready().items():
            turn = self._turns[self._key_of.pop(identity)]
            turn.answers[turn.places.pop(identity)] = self._told(outcome)
        done = [key for key, turn in self._turns.items() if not turn.places]
        return {key: self._tokenizer.tool_turn(self._turns.pop(key).answers) for key in done}

    def _shared(self, find: Callable[[], Mapping[int, tuple[int, ...]]]) -> dict[int, tuple[int, ...]]:
        """What the first rank finds, on every rank of the engine."""
        found = [find() if self._pool is not None else None]
        if self._group is not None:
            dist.broadcast_object_list(found, src=dist.get_global_rank(self._group, 0), group=self._group)
        return dict(found[0] or {})


def _start_pool(section: RolloutSection) -> Pool:
    most = section.max_tool_answer_tokens * _CHARACTERS_PER_TOKEN
    entries = [
        Entry(
            tool.function,
            {"arguments": tool.arguments, "most_characters": most},
            f"rollout.tools.{index}.function",
            loader=LOADER,
        )
        for index, tool in enumerate(section.tools)
    ]
    pool = Pool(entries, section.tool_processes, section.tool_time_limit_seconds)
    try:
        pool.wait_until_started()
    except BaseException:
        pool.close()
        raise
    return pool
