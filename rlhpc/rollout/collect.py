"""Collects one engine's responses, from requests to scored samples.

All ranks of the engine run it alike. The first of them has the reward workers, which score finished responses while the
engine generates the others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from rlhpc.api import Completion, RewardResult, RewardWorkers, RolloutEngine, Sample
from rlhpc.core import spans
from rlhpc.core.heartbeat import touch
from rlhpc.rollout.requests import Sampling, Task, from_turn, request_of, with_sampled, with_tool_tokens

Place = tuple[int, int]  # group and index of a response


@dataclass(frozen=True)
class Reply:
    """Tools' answers to one turn, as tokens; the number of its calls and of those that failed."""

    tokens: tuple[int, ...]
    calls: int = 0
    failures: int = 0


class Dialogue(Protocol):
    """Replies between two turns of the policy. All ranks of the engine make the same calls."""

    def begin(self, key: int, task: Task) -> bool:
        """Begins to answer the last turn of a task's draft; false if it calls no tool, or its calls are not run."""

    def unanswered(self, task: Task) -> bool:
        """True if the last turn of a task's draft calls tools, but is the last turn allowed: its calls are not run."""

    def answers(self, *, all_of_them: bool) -> dict[int, Reply]:
        """Replies that were not returned before, by key; waits for at least one, or for all."""

    def ready(self) -> dict[int, Reply]:
        """Replies that arrived and were not returned before; does not wait."""

    def arrived(self) -> Collection[int]:
        """Keys of the replies that ``ready`` would return, on the engine's first rank alone."""

    def end(self, task: Task) -> None:
        """Frees what belongs to a response that is finished, or aborted and perhaps resumed elsewhere."""


@dataclass(frozen=True)
class Scored:
    """A finished response, ``dropped`` if it is excluded from training; or an aborted one, not scored.

    ``failures`` are the kinds of its rewards' failures. Tool calls are counted from when it was begun or resumed.
    """

    group: int
    index: int
    sample: Sample
    dropped: bool = False
    failures: tuple[str, ...] = ()
    tool_calls: int = 0
    failed_tool_calls: int = 0


@dataclass
class Stepped:
    """Events of an engine step, in their order. Equal on all ranks of the engine."""

    requests: int = 0  # in the engine during the step
    ended_groups: list[int] = field(default_factory=list)  # groups whose last response finished
    calls: list[Place] = field(default_factory=list)  # responses that wait for tools from now on

    def then(self, other: Stepped) -> Stepped:
        """This and what happened next."""
        groups, calls = [*self.ended_groups, *other.ended_groups], [*self.calls, *other.calls]
        return Stepped(other.requests, groups, calls)


@dataclass(frozen=True)
class Draft:
    """A response in flight, with the tokens that it has so far."""

    task: Task
    calls: bool  # it waits for tools


class Collector:
    """Responses in flight on one engine. Each task ends in ``harvest`` or in ``stop``.

    ``advance`` also takes replies of tools. A caller with a schedule of its own uses ``step``, ``resume`` and
    ``switch`` instead, which never depend on how long tools take.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        sampling: Sampling,
        reward_workers: RewardWorkers | None,
        policy_version: int,
        dialogue: Dialogue | None = None,
    ) -> None:
        """``reward_workers``: on the engine's first rank only; ``policy_version``: that of the engine's weights."""
        self._engine, self._sampling, self._reward_workers = engine, sampling, reward_workers
        self._version, self._dialogue = policy_version, dialogue
        self.tasks: dict[int, Task] = {}  # in the engine
        self._drafted: Counter[int] = Counter()  # tokens of a request that its task's draft already has
        self._calling: dict[int, Task] = {}  # waiting for tools
        self._early: dict[int, Reply] = {}  # replies that nobody has taken yet
        self._aside: tuple[list[Task], dict[int, Task]] = [], {}  # set aside: requests, those that wait for tools
        self._being_scored: dict[int, Task] = {}
        self._unfinished: Counter[int] = Counter()  # responses in flight, by group
        self._next = 0
        self._stepped = Stepped()
        self.ended_groups = 0  # groups of which all responses are finished

    @property
    def in_flight(self) -> int:
        """Responses that are not finished."""
        return len(self.tasks) + len(self._calling)

    @property
    def requests(self) -> int:
        """Responses in the engine, without those that wait for tools."""
        return len(self.tasks)

    def begin(self, tasks: Sequence[Task]) -> None:
        """Submits responses."""
        self._unfinished.update(task.group for task in tasks)
        for task in tasks:
            self._request(task)

    def restore(self, drafts: Sequence[Draft]) -> None:
        """Continues with what ``drafts`` of another collector returned. Calls of tools are made again."""
        for draft in drafts:
            self._unfinished[draft.task.group] += 1
            if not draft.calls:
                self._request(draft.task)
                continue
            assert self._dialogue is not None, "a response waits for tools, and there are none"
            key, self._next = self._next, self._next + 1
            assert self._dialogue.begin(key, draft.task), "a response waits for tools, and calls none"
            self._calling[key] = draft.task

    def drafts(self) -> list[Draft]:
        """All responses in flight: running ones, queued ones, and those that wait for tools, each in order. After
        ``switch`` and the engine's ``preempt``, a collector that restores them continues as this one, bit for bit."""
        keys = self._engine.order()
        self._update_drafts(keys)
        running = [Draft(self.tasks[key], calls=False) for key in keys]
        return running + [Draft(task, calls=True) for task in self._calling.values()]

    def switch(self, policy_version: int) -> Stepped:
        """Tokens are sampled with another policy version from now on; the caller syncs the weights next. Returns what
        ended with the step in flight on the device, if there was one."""
        self._stepped = Stepped(0)
        self._take(self._engine.settle())
        self._update_drafts(list(self.tasks))
        self._version = policy_version
        return self._stepped

    def step(self) -> Stepped:
        """Samples one token of each response in the engine. Takes no replies."""
        self._stepped = Stepped(len(self.tasks))
        finished = self._engine.step()
        spans.worked(sum(len(completion.tokens) for _, completion in finished), rounds=1)
        self._take(finished)
        return self._stepped

    def answered(self) -> list[Place]:
        """Responses that wait for tools and whose replies are there, in order. On the engine's first rank alone."""
        if not self._calling or self._dialogue is None:
            return []
        arrived = {*self._early, *self._dialogue.arrived()}
        return [(task.group, task.index) for key, task in self._calling.items() if key in arrived]

    def resume(self, places: Sequence[Place]) -> Stepped:
        """Takes the replies to responses that wait for tools, waits for them, and submits the next turns in this
        order."""
        assert self._dialogue is not None
        self._stepped = Stepped(len(self.tasks))
        key_of = {(task.group, task.index): key for key, task in self._calling.items()}
        keys = [key_of[place] for place in places]
        while not self._early.keys() >= set(keys):
            self._early |= self._replies(all_of_them=False)
        self._resume({key: self._early.pop(key) for key in keys})
        return self._stepped

    def lend(self, count: int) -> list[Task]:
        """Withdraws the last ``count`` requests in the engine's order, with what they have generated. They remain
        unfinished responses of their groups, and must come back with ``take_back``."""
        assert count <= len(self.tasks), f"{count} of {len(self.tasks)} requests"
        return self._withdraw(self._engine.order()[len(self.tasks) - count :])

    def take_back(self, ended: Sequence[Task], unfinished: Sequence[Task]) -> Stepped:
        """Takes requests back that were withdrawn: ends the turns of those that are finished, and submits the others,
        each in order."""
        self._stepped = Stepped(len(self.tasks))
        for task in ended:
            key, self._next = self._next, self._next + 1
            self._end_turn(task, key)
        for task in unfinished:
            self._request(task)
        return self._stepped

    def set_aside(self) -> None:
        """Withdraws all responses in flight, so that others are generated alone. Their tools go on."""
        assert self._aside == ([], {}), "responses are set aside already"
        self._aside = self._withdraw(self._engine.order()), self._calling
        self._calling = {}

    def take_up(self) -> None:
        """Continues with the responses that were set aside, as after the engine's ``preempt``."""
        assert not self.in_flight, "other responses are in flight"
        self._engine.preempt()
        tasks, self._calling = self._aside
        self._aside = [], {}
        for task in tasks:
            self._request(task)

    def advance(self, steps: int | None = None) -> None:
        """Generates until all responses are finished, or ``steps`` tokens of each.

        With ``steps`` it waits for all tools at the end, so that which responses are finished does not depend on how
        long tools take.
        """
        while self.in_flight and steps != 0:
            self.step()
            if self._calling:
                self._take_replies(in_steps=steps is not None)
            if steps is not None:
                steps -= 1
        if steps == 0 and self._calling:
            self._take_in_order(self._replies(all_of_them=True))

    def harvest(self, *, wait: bool = True) -> list[Scored]:
        """Responses finished since the last call, scored, ordered by group; waits for the reward workers, or leaves out
        those without a result. Empty except on the engine's first rank."""
        if self._reward_workers is None:
            return []
        if wait:
            touch("score")
            with spans.part("reward", waits=True):
                results = self._reward_workers.results()
        else:
            results = self._reward_workers.ready()
        found = []
        for key, result in results.items():
            task = self._being_scored.pop(key)
            sample = replace(task.draft, reward=result.reward, reward_parts=result.parts, answer=result.answer)
            found.append(_scored(replace(task, draft=sample), result))
        assert not (wait and self._being_scored), f"{len(self._being_scored)} responses without a result"
        return sorted(found, key=lambda scored: (scored.group, scored.index))

    def statistics(self) -> dict[str, float]:
        """Metrics of responses that waited since the last call; none if their order is the engine's."""
        return {}

    def forget_calls(self) -> None:
        """Gives up the responses that wait for tools."""
        for task in self._calling.values():
            self._leave(task)
            self._unfinished[task.group] = 0
        self._calling = {}

    def abandon(self) -> None:
        """Gives up all responses, and waits until nothing of theirs is on the way: tools and reward workers go on with
        others. The last use; all ranks of the engine call it alike."""
        if self._calling:
            self._replies(all_of_them=True)
            self.forget_calls()
        if self.tasks:
            self._engine.abort(list(self.tasks))
        for task in self.tasks.values():
            self._leave(task)
        self.tasks = {}
        self.harvest()

    def stop(self) -> list[Scored]:
        """Aborts the responses in flight; they are not scored and may be resumed. Equal on all ranks of the engine."""
        assert not self._calling, "tools are still running"
        unfinished = self._engine.abort(list(self.tasks))
        found = []
        spans.worked(sum(len(completion.tokens) for completion in unfinished.values()))
        for key, completion in unfinished.items():
            task = self.tasks.pop(key)
            self._leave(task)
            found.append(_scored(self._extended(task, completion, self._drafted.pop(key, 0))))
        assert not self.tasks
        return sorted(found, key=lambda scored: (scored.group, scored.index))

    def _withdraw(self, keys: Sequence[int]) -> list[Task]:
        """Removes requests from the engine; their tasks with what they have generated."""
        if not keys:
            return []
        self._update_drafts(keys)
        self._engine.abort(keys)
        for key in keys:
            del self._drafted[key]
        return [self.tasks.pop(key) for key in keys]

    def _request(self, task: Task) -> None:
        if self._sampling.of(task).options.depends_on_turn:
            task = replace(task, draft=from_turn(task.draft))
        self._engine.submit(self._next, request_of(task, self._sampling))
        self.tasks[self._next] = task
        self._next += 1

    def _take(self, finished: Sequence[tuple[int, Completion]]) -> None:
        """Ends the turns of finished requests."""
        for key, completion in finished:
            task = self._extended(self.tasks.pop(key), completion, self._drafted.pop(key, 0))
            ended = replace(task.draft, truncated=completion.truncated, stop_tokens=completion.stop_tokens)
            self._end_turn(replace(task, draft=ended), key)

    def _update_drafts(self, keys: Sequence[int]) -> None:
        """Appends to the drafts of requests in flight what they have generated with the present weights."""
        for key, completion in self._engine.so_far({key: self._drafted[key] for key in keys}).items():
            self.tasks[key] = self._extended(self.tasks[key], completion, 0)
            self._drafted[key] += len(completion.tokens)

    def _extended(self, task: Task, completion: Completion, drafted: int) -> Task:
        """The task with a request's tokens from the place ``drafted`` on."""
        if len(completion.tokens) == drafted:
            return task
        tokens, log_probs, kept = completion.tokens[drafted:], completion.log_probs[drafted:], completion.kept
        kept = None if kept is None else kept[drafted:]
        rest = replace(completion, tokens=tokens, log_probs=log_probs, kept=kept)
        return replace(task, draft=replace(with_sampled(task.draft, rest, self._version), truncated=False))

    def _end_turn(self, task: Task, key: int) -> None:
        if self._dialogue is None or task.draft.truncated:
            self._end(task, key)
        elif self._dialogue.begin(key, task):
            self._calling[key] = task
            self._stepped.calls.append((task.group, task.index))
        else:
            stopped = self._dialogue.unanswered(task)
            self._end(replace(task, draft=replace(task.draft, truncated=stopped)), key)

    def _replies(self, *, all_of_them: bool) -> dict[int, Reply]:
        assert self._dialogue is not None
        with spans.part("tools", waits=True):
            return self._dialogue.answers(all_of_them=all_of_them)

    def _take_replies(self, *, in_steps: bool) -> None:
        """Takes replies of tools; waits for them only if the engine is idle."""
        if not self.tasks:
            self._take_in_order(self._replies(all_of_them=in_steps))
        elif not in_steps and self._dialogue is not None:
            self._take_in_order(self._dialogue.ready())

    def _take_in_order(self, replies: dict[int, Reply]) -> None:
        """Submits the next turns, except of responses that are set aside."""
        self._early |= {key: reply for key, reply in replies.items() if key not in self._calling}
        self._resume({key: replies[key] for key in sorted(replies) if key in self._calling})

    def _resume(self, replies: dict[int, Reply]) -> None:
        """Submits the next turns."""
        for key, reply in replies.items():
            task = self._calling.pop(key)
            tokens, calls, failed = reply.tokens, task.tool_calls + reply.calls, task.failed_tool_calls + reply.failures
            task = replace(task, tool_calls=calls, failed_tool_calls=failed)
            if tokens[:1] == (int(task.draft.tokens[-1]),):  # the end of the turn, which the policy sampled itself
                tokens = tokens[1:]
            if task.draft.response_len + len(tokens) < self._sampling.of(task).max_tokens:
                self._request(replace(task, draft=with_tool_tokens(task.draft, tokens)))
            else:  # no room for another turn
                self._end(replace(task, draft=replace(task.draft, truncated=True)), key)

    def _end(self, task: Task, key: int) -> None:
        """Finishes a response and submits it to the reward workers, under the ``key`` of its last request."""
        self._leave(task)
        self._unfinished[task.group] -= 1
        if not self._unfinished[task.group]:
            self.ended_groups += 1
            self._stepped.ended_groups.append(task.group)
        if self._reward_workers is None:
            return
        draft = task.draft
        self._being_scored[key] = task
        response = Completion(
            draft.tokens[draft.prompt_len :], draft.log_probs, draft.truncated, tool_tokens=draft.tool_tokens
        )
        self._reward_workers.submit(key, task.prompt, response)

    def _leave(self, task: Task) -> None:
        if self._dialogue is not None:
            self._dialogue.end(task)


def _scored(task: Task, result: RewardResult | None = None) -> Scored:
    dropped, failures = (result.dropped, result.failures) if result is not None else (False, ())
    return Scored(task.group, task.index, task.draft, dropped, failures, task.tool_calls, task.failed_tool_calls)
