"""Tools between the policy's turns: called in processes beside the engine, answered through the chat template."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from rlhpc.api import Sample
from rlhpc.config.rollout import RolloutSection
from rlhpc.core.heartbeat import touch
from rlhpc.data.tokenizer import Tokenizer, split_turns
from rlhpc.rewards.calls import Failure
from rlhpc.rewards.pool import Pool, PoolCall
from rlhpc.rollout.collect import Reply
from rlhpc.rollout.requests import Task, last_turn, turns
from rlhpc.rollout.tool_calls import MethodCall, ToolAnswer, ToolCall
from rlhpc.rollout.tool_kinds import Tool, find_tools, tool_schemas
from rlhpc.rollout.tool_parsers import Parser, find_parser

_CHARACTERS_PER_TOKEN = 16  # more than any tokenizer's texts have on average
_LOOK_SECONDS = 0.005
_ERROR = "error: "
_log = logging.getLogger(__name__)


@dataclass
class _Conversation:
    """A response in flight that has called tools with state. ``past``: its successful calls, repeated if an object is
    lost."""

    number: int
    extra_info: Mapping[str, Any]
    past: list[ToolCall]
    used: set[int] = field(default_factory=set)  # entries of which it has objects


@dataclass
class _Turn:
    """The calls of one turn and their answers. Calls of tools with state are made one at a time."""

    task: Task
    names: list[str]  # of the tools called
    answers: list[str | None]  # None: not yet answered
    failures: int = 0  # answers that are errors
    running: dict[int, tuple[int, ToolCall]] = field(default_factory=dict)  # by identity: place in the turn, call
    waiting: deque[tuple[int, ToolCall]] = field(default_factory=deque)


class ToolUse:
    """One engine's tools; implements ``Dialogue`` (``rlhpc.rollout.collect``).

    The engine's first rank calls them and broadcasts their answers over ``group``. A call that raises, hangs or returns
    too long an answer is answered with an error text.
    """

    def __init__(
        self, section: RolloutSection, tokenizer: Tokenizer, *, leads: bool, group: dist.ProcessGroup | None = None
    ) -> None:
        """``leads``: on the engine's first rank; ``group``: CPU group of the engine's ranks, None for a single one."""
        self._section, self._tokenizer, self._group = section, tokenizer, group
        tokenizer.check_tool_turns()
        self._parse = find_parser(section.tool_parser, tokenizer, tool_schemas(section.tools))
        tools = find_tools(section.tools) if leads else []
        self._tools = {tool.section.name: tool for tool in tools}
        kinds = list(dict.fromkeys(tool.kind for tool in tools))
        self._entry_of = {tool.section.name: kinds.index(tool.kind) for tool in tools}
        self._pool = _start_pool(section, {tool.kind: tool for tool in reversed(tools)}, kinds) if leads else None
        self._turns: dict[int, _Turn] = {}
        self._key_of: dict[int, int] = {}  # by running call: key of its turn
        self._conversations: dict[tuple[int, int], _Conversation] = {}
        self._closing: set[int] = set()
        self._answered: dict[int, Reply] = {}  # that nobody has taken yet
        self._next = 0

    def begin(self, key: int, task: Task) -> bool:
        """See ``Dialogue``. Calls of a response's last turn (``max_turns``) are not run."""
        if self._is_last(task):
            return False
        calls = self._calls(task)
        if calls and self._pool is not None:
            turn = self._turns[key] = _Turn(
                task, [getattr(call, "name", "tool") for call in calls], [None] * len(calls)
            )
            for place, call in enumerate(calls):
                self._call(key, turn, place, call)
            self._call_next(key, turn)
        return bool(calls)

    def unanswered(self, task: Task) -> bool:
        """See ``Dialogue``."""
        return self._is_last(task) and bool(self._calls(task))

    def ready(self) -> dict[int, Reply]:
        """See ``Dialogue``. Collective over the engine's ranks."""
        return self._shared(self._finished)

    def arrived(self) -> Collection[int]:
        """See ``Dialogue``."""
        self._answered |= self._finished()
        return self._answered.keys()

    def answers(self, *, all_of_them: bool) -> dict[int, Reply]:
        """See ``Dialogue``. Collective over the engine's ranks."""

        def wait() -> dict[int, Reply]:
            found = self._finished()
            while self._turns and (all_of_them or not found):
                time.sleep(_LOOK_SECONDS)
                touch("tools")
                found |= self._finished()
            return found

        return self._shared(wait)

    def end(self, task: Task) -> None:
        """See ``Dialogue``. Closes the conversation's objects; if the response is resumed, it gets new ones."""
        conversation = self._conversations.pop((task.group, task.index), None)
        if conversation is None:
            return
        entries = sorted(conversation.used)
        for entry in entries:
            closing = MethodCall(conversation.number, None, {}, (), {})
            self._closing.add(self._submit(entry, closing, last=entry == entries[-1]))

    def close(self) -> None:
        """Ends the processes, once the objects of finished conversations are closed."""
        if self._pool is not None:
            while self._closing:
                self._finished()
                time.sleep(_LOOK_SECONDS)
            self._pool.close()

    def _is_last(self, task: Task) -> bool:
        return turns(task.draft) >= self._section.max_turns

    def _calls(self, task: Task) -> list[ToolCall | Failure]:
        """Calls of the last turn."""
        return self._parse(self._tokenizer.decode(last_turn(task.draft).tolist(), special=True))

    def _call(self, key: int, turn: _Turn, place: int, call: ToolCall | Failure) -> None:
        most = self._section.max_calls_per_turn
        if place >= most:
            call = Failure("result", f"only {most} calls of a turn are run")
        elif isinstance(call, ToolCall) and call.name not in self._tools:
            call = Failure("result", f"there is no tool {call.name!r:.80}, only {', '.join(self._tools)}")
        if isinstance(call, Failure):
            self._answer(turn, place, call)
        elif self._tools[call.name].owner is not None:
            turn.waiting.append((place, call))
        else:
            identity = self._submit(self._entry_of[call.name], call.arguments)
            self._key_of[identity] = key
            turn.running[identity] = place, call

    def _call_next(self, key: int, turn: _Turn) -> None:
        """Makes the next call of a tool with state, unless one is running."""
        if not turn.waiting or any(self._tools[call.name].owner for _, call in turn.running.values()):
            return
        place, call = turn.waiting.popleft()
        conversation = self._conversation(turn.task)
        entry = self._entry_of[call.name]
        conversation.used.add(entry)
        past = tuple(
            (method, former.arguments)
            for former in conversation.past
            if self._entry_of.get(former.name) == entry and (method := self._tools[former.name].method) is not None
        )
        method_call = MethodCall(
            conversation.number, self._tools[call.name].method, call.arguments, past, conversation.extra_info
        )
        identity = self._submit(entry, method_call)
        self._key_of[identity] = key
        turn.running[identity] = place, call

    def _conversation(self, task: Task) -> _Conversation:
        """The response's conversation; for a resumed response, its past calls are parsed from its tokens."""
        key = task.group, task.index
        if key not in self._conversations:
            self._next += 1
            past = answered_calls(self._tokenizer, self._parse, task.draft) if turns(task.draft) > 1 else []
            self._conversations[key] = _Conversation(self._next, task.prompt.extra_info, past)
        return self._conversations[key]

    def _submit(self, entry: int, keywords: MethodCall | Mapping[str, Any], *, last: bool = False) -> int:
        """Submits a call to the processes; returns its identity."""
        assert self._pool is not None, "only the engine's first rank calls tools"
        self._next += 1
        home = keywords.conversation if isinstance(keywords, MethodCall) else None
        self._pool.submit([PoolCall((self._next, entry), keywords, home, last)])
        return self._next

    def _answer(self, turn: _Turn, place: int, outcome: ToolAnswer | Failure) -> bool:
        """Records the answer to a call; false if it is an error."""
        if isinstance(outcome, ToolAnswer):
            count = self._tokenizer.count(outcome.text)
            if count <= self._section.max_tool_answer_tokens:
                turn.answers[place] = outcome.text
                return not outcome.text.startswith(_ERROR)
            outcome = Failure("result", f"the answer has {count} tokens, which is too long")
        turn.failures += 1
        turn.answers[place] = f"{_ERROR}{outcome.what}"
        return False

    def _finished(self) -> dict[int, Reply]:
        """Replies to turns of which all calls are answered, that were not returned before."""
        assert self._pool is not None, "only the engine's first rank calls tools"
        for (identity, _), outcome in self._pool.ready().items():
            if identity in self._closing:
                self._closing.remove(identity)
                if isinstance(outcome, Failure):
                    _log.warning("a tool's close %s", outcome.what)
                continue
            self._settle(identity, outcome)
        done = [key for key, turn in self._turns.items() if not turn.running]
        found, self._answered = self._answered, {}
        return found | {key: self._reply(self._turns.pop(key)) for key in done}

    def _reply(self, turn: _Turn) -> Reply:
        answers = [answer for answer in turn.answers if answer is not None]
        assert len(answers) == len(turn.answers), "a call without an answer"
        return Reply(self._tokenizer.tool_turn(answers, turn.names), len(answers), turn.failures)

    def _settle(self, identity: int, outcome: ToolAnswer | Failure) -> None:
        key = self._key_of.pop(identity)
        turn = self._turns[key]
        place, call = turn.running.pop(identity)
        if self._answer(turn, place, outcome) and self._tools[call.name].owner is not None:
            self._conversation(turn.task).past.append(call)
        self._call_next(key, turn)

    def _shared(self, find: Callable[[], Mapping[int, Reply]]) -> dict[int, Reply]:
        """Broadcasts the first rank's replies to every rank of the engine."""
        found = [find() if self._pool is not None else None]
        if self._group is not None:
            dist.broadcast_object_list(found, src=dist.get_global_rank(self._group, 0), group=self._group)
        return dict(found[0] or {})


def answered_calls(tokenizer: Tokenizer, parse: Parser, draft: Sample) -> list[ToolCall]:
    """The successful calls of the response's earlier turns, in order."""
    found: list[ToolCall] = []
    calls: list[ToolCall | Failure] = []
    for of_policy, tokens in split_turns(draft):
        if of_policy:
            calls = parse(tokenizer.decode(tokens.tolist(), special=True))
            continue
        answers: Sequence[str] = tokenizer.tool_answers(tokens.tolist())
        if len(answers) != len(calls):  # an answer contains the template's separator
            answers = [""] * len(calls)
        pairs = zip(calls, answers, strict=True)
        found += [call for call, text in pairs if isinstance(call, ToolCall) and not text.startswith(_ERROR)]
    return found


def _start_pool(section: RolloutSection, tools: Mapping[str, Tool], kinds: Sequence[str]) -> Pool[ToolAnswer]:
    most = section.max_tool_answer_tokens * _CHARACTERS_PER_TOKEN
    entries = [tools[kind].entry(most) for kind in kinds]
    pool = Pool[ToolAnswer](entries, section.tool_processes, section.tool_time_limit_seconds)
    try:
        pool.wait_until_started()
    except BaseException:
        pool.close()
        raise
    return pool
