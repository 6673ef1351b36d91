"""Collects one engine's responses, from requests to scored samples.

All ranks of the engine run it alike. The first of them has the reward workers, which score finished responses while the
engine generates the others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from rlhpc.api import Completion, RewardResult, RewardWorkers, RolloutEngine, Sample
from rlhpc.core import spans
from rlhpc.core.heartbeat import touch
from rlhpc.rollout.requests import Sampling, Task, request_of, with_sampled, with_tool_tokens


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
        """Whether the last turn of a task's draft calls tools, but is the last turn allowed: its calls are not run."""

    def answers(self, *, all_of_them: bool) -> dict[int, Reply]:
        """Replies that were not returned before, by key; waits for at least one, or for all."""

    def ready(self) -> dict[int, Reply]:
        """Replies that arrived and were not returned before; does not wait."""

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


class Collector:
    """Responses in flight on one engine. Each task ends in ``harvest`` or in ``stop``."""

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
        self._requests: dict[int, Task] = {}  # in the engine
        self._calling: dict[int, Task] = {}  # waiting for tools
        self._being_scored: dict[int, Task] = {}
        self._unfinished: Counter[int] = Counter()  # responses in flight, by group
        self._next = 0
        self.ended_groups = 0  # groups of which all responses are finished

    @property
    def in_flight(self) -> int:
        """Responses that are not finished."""
        return len(self._requests) + len(self._calling)

    def begin(self, tasks: Sequence[Task]) -> None:
        """Submits responses."""
        self._unfinished.update(task.group for task in tasks)
        for task in tasks:
            self._request(task)

    def advance(self, steps: int | None = None) -> None:
        """Generates until all responses are finished, or ``steps`` tokens of each.

        With ``steps`` it waits for all tools at the end, so that which responses are finished does not depend on how
        long tools take.
        """
        while self.in_flight and steps != 0:
            finished = self._engine.step()
            spans.worked(sum(len(completion.tokens) for _, completion in finished), rounds=1)
            for key, completion in finished:
                self._end_turn(self._requests.pop(key), completion, key)
            if self._calling:
                self._take_replies(in_steps=steps is not None)
            if steps is not None:
                steps -= 1
        if steps == 0 and self._calling:
            self._resume(self._replies(all_of_them=True))

    def harvest(self) -> list[Scored]:
        """Responses finished since the last call, scored, ordered by group; waits for the reward workers. Empty except
        on the engine's first rank."""
        if self._reward_workers is None:
            return []
        touch("score")
        with spans.part("reward", waits=True):
            results = self._reward_workers.results()
        found = []
        for key, result in results.items():
            task = self._being_scored.pop(key)
            sample = replace(task.draft, reward=result.reward, reward_parts=result.parts, answer=result.answer)
            found.append(_scored(replace(task, draft=sample), result))
        assert not self._being_scored, f"{len(self._being_scored)} responses without a result"
        return sorted(found, key=lambda scored: (scored.group, scored.index))

    def stop(self) -> list[Scored]:
        """Aborts the responses in flight; they are not scored and may be resumed. Equal on all ranks of the engine."""
        assert not self._calling, "tools are still running"
        unfinished = self._engine.abort(list(self._requests))
        found = []
        spans.worked(sum(len(completion.tokens) for completion in unfinished.values()))
        for key, completion in unfinished.items():
            task = self._requests.pop(key)
            self._leave(task)
            draft = task.draft
            if len(completion.tokens):
                draft = replace(with_sampled(draft, completion, self._version), truncated=False)
            found.append(_scored(replace(task, draft=draft)))
        assert not self._requests
        return sorted(found, key=lambda scored: (scored.group, scored.index))

    def _request(self, task: Task) -> None:
        self._engine.submit(self._next, request_of(task, self._sampling))
        self._requests[self._next] = task
        self._next += 1

    def _end_turn(self, task: Task, completion: Completion, key: int) -> None:
        task = replace(task, draft=with_sampled(task.draft, completion, self._version))
        if self._dialogue is None or completion.truncated:
            self._end(task, key)
        elif self._dialogue.begin(key, task):
            self._calling[key] = task
        else:
            stopped = self._dialogue.unanswered(task)
            self._end(replace(task, draft=replace(task.draft, truncated=stopped)), key)

    def _replies(self, *, all_of_them: bool) -> dict[int, Reply]:
        assert self._dialogue is not None
        with spans.part("tools", waits=True):
            return self._dialogue.answers(all_of_them=all_of_them)

    def _take_replies(self, *, in_steps: bool) -> None:
        """Takes replies of tools; waits for them only if the engine is idle."""
        if not self._requests:
            self._resume(self._replies(all_of_them=in_steps))
        elif not in_steps and self._dialogue is not None:
            self._resume(self._dialogue.ready())

    def _resume(self, replies: dict[int, Reply]) -> None:
        """Submits the next turns."""
        for key in sorted(replies):
            task, reply = self._calling.pop(key), replies[key]
            tokens, calls, failed = reply.tokens, task.tool_calls + reply.calls, task.failed_tool_calls + reply.failures
            task = replace(task, tool_calls=calls, failed_tool_calls=failed)
            if tokens[:1] == (int(task.draft.tokens[-1]),):  # the end of the turn, which the policy sampled itself
                tokens = tokens[1:]
            if task.draft.response_len + len(tokens) < self._sampling.max_tokens:
                self._request(replace(task, draft=with_tool_tokens(task.draft, tokens)))
            else:  # no room for another turn
                self._end(replace(task, draft=replace(task.draft, truncated=True)), key)

    def _end(self, task: Task, key: int) -> None:
        """Finishes a response and submits it to the reward workers, under the ``key`` of its last request."""
        self._leave(task)
        self._unfinished[task.group] -= 1
        self.ended_groups += not self._unfinished[task.group]
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
