"""One engine's responses, from requests to scored samples.

All ranks of the engine run it alike. The first of them has the reward workers, which score finished responses while the
engine goes on with the others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from rlhpc.api import Completion, RewardWorkers, RolloutEngine, Sample
from rlhpc.core.heartbeat import touch
from rlhpc.rollout.requests import Sampling, Task, request_of, with_drawn, with_given


@dataclass(frozen=True)
class Reply:
    """What tools answered to one turn: its tokens, the number of calls, and of those that failed."""

    tokens: tuple[int, ...]
    calls: int = 0
    failures: int = 0


class Dialogue(Protocol):
    """What goes on between two turns of the policy; all ranks of the engine ask it alike."""

    def begin(self, key: int, task: Task) -> bool:
        """Answer the last turn of a task's draft, which is finished; false if it asks for nothing."""

    def answers(self, all_of_them: bool) -> dict[int, Reply]:
        """Replies that came since the last call, by key; waits for one at least, or for all."""

    def ready(self) -> dict[int, Reply]:
        """The same without waiting."""

    def end(self, task: Task) -> None:
        """The response has come to its end, or is taken back and may be gone on with elsewhere."""


@dataclass(frozen=True)
class Scored:
    """A finished response; ``dropped`` if it is to be left out.

    ``failures`` are the kinds of its rewards' failures. A response that is taken back has those counts of tool calls
    that were made until then, and begins with none when it is resumed.
    """

    group: int
    index: int
    sample: Sample
    dropped: bool = False
    failures: tuple[str, ...] = ()
    tool_calls: int = 0
    failed_tool_calls: int = 0


class Collector:
    """Responses under way on one engine. Each task ends in ``harvest`` or in ``stop``."""

    def __init__(
        self,
        engine: RolloutEngine,
        sampling: Sampling,
        reward_workers: RewardWorkers | None,
        policy_version: int,
        dialogue: Dialogue | None = None,
    ) -> None:
        """``reward_workers`` on the engine's first rank only; ``policy_version`` is of the weights in the engine."""
        self._engine, self._sampling, self._reward_workers = engine, sampling, reward_workers
        self._version, self._dialogue = policy_version, dialogue
        self._requests: dict[int, Task] = {}  # in the engine
        self._asking: dict[int, Task] = {}  # in the dialogue
        self._being_scored: dict[int, Task] = {}  # with the reward workers
        self._left: Counter[int] = Counter()  # of each group, responses under way
        self._next = 0
        self.ended_groups = 0  # all responses that were begun have come to their end

    @property
    def under_way(self) -> int:
        """Responses that have not come to their end."""
        return len(self._requests) + len(self._asking)

    def begin(self, tasks: Sequence[Task]) -> None:
        """Put responses under way."""
        self._left.update(task.group for task in tasks)
        for task in tasks:
            self._request(task)

    def advance(self, steps: int | None = None) -> None:
        """Let the engine run: to the end of all responses, or so many tokens of each.

        With ``steps`` nothing is in the dialogue at the end, so that what has ended by then does not depend on how
        long a tool takes.
        """
        while self.under_way and steps != 0:
            for key, completion in self._engine.step():
                self._turn_ends(self._requests.pop(key), completion, key)
            if self._asking:
                self._take_answers(steps is not None)
            if steps is not None:
                steps -= 1
        if steps == 0 and self._asking:
            self._go_on(self._dialogue.answers(all_of_them=True))

    def harvest(self) -> list[Scored]:
        """What has ended since the last call, scored, in the order of groups; waits for the reward workers. None on
        other ranks than the engine's first."""
        if self._reward_workers is None:
            return []
        touch("score")
        results = self._reward_workers.results()
        found = []
        for key, result in results.items():
            task = self._being_scored.pop(key)
            given = {"reward": result.reward, "reward_parts": result.parts, "answer": result.answer}
            sample = replace(task.draft, **given)
            found.append(_scored(replace(task, draft=sample), result.dropped, result.failures))
        assert not self._being_scored, f"{len(self._being_scored)} responses without a result"
        return sorted(found, key=lambda scored: (scored.group, scored.index))

    def stop(self) -> list[Scored]:
        """Take back what is under way: not scored, to be gone on with. The same on all ranks of the engine."""
        assert not self._asking, "tools still answer"
        unfinished = self._engine.abort(list(self._requests))
        found = []
        for key, completion in unfinished.items():
            task = self._requests.pop(key)
            self._leave(task)
            draft = task.draft
            if len(completion.tokens):
                draft = replace(with_drawn(draft, completion, self._version), truncated=False)
            found.append(_scored(replace(task, draft=draft)))
        assert not self._requests
        return sorted(found, key=lambda scored: (scored.group, scored.index))

    def _request(self, task: Task) -> None:
        self._engine.submit(self._next, request_of(task, self._sampling))
        self._requests[self._next] = task
        self._next += 1

    def _turn_ends(self, task: Task, completion: Completion, key: int) -> None:
        task = replace(task, draft=with_drawn(task.draft, completion, self._version))
        if self._dialogue is not None and not completion.truncated and self._dialogue.begin(key, task):
            self._asking[key] = task
        else:
            self._end(task, key)

    def _take_answers(self, in_steps: bool) -> None:
        """Waiting only where the engine has nothing else to do."""
        if not self._requests:
            self._go_on(self._dialogue.answers(all_of_them=in_steps))
        elif not in_steps:
            self._go_on(self._dialogue.ready())

    def _go_on(self, replies: dict[int, Reply]) -> None:
        for key in sorted(replies):
            task, reply = self._asking.pop(key), replies[key]
            tokens, calls, failed = reply.tokens, task.tool_calls + reply.calls, task.failed_tool_calls + reply.failures
            task = replace(task, tool_calls=calls, failed_tool_calls=failed)
            if tokens[:1] == (task.draft.tokens[-1],):  # the end of the turn, which the policy has drawn
                tokens = tokens[1:]
            if task.draft.response_len + len(tokens) < self._sampling.max_tokens:
                self._request(replace(task, draft=with_given(task.draft, tokens)))
            else:  # no room for another turn
                self._end(replace(task, draft=replace(task.draft, truncated=True)), key)

    def _end(self, task: Task, key: int) -> None:
        """``key`` is of its last request; reward workers are the first rank's alone, and no keys are made for them."""
        self._leave(task)
        self._left[task.group] -= 1
        self.ended_groups += not self._left[task.group]
        if self._reward_workers is None:
            return
        draft = task.draft
        self._being_scored[key] = task
        response = draft.tokens[draft.prompt_len :]
        self._reward_workers.submit(key, task.prompt, Completion(response, draft.log_probs, draft.truncated))

    def _leave(self, task: Task) -> None:
        if self._dialogue is not None:
            self._dialogue.end(task)


def _scored(task: Task, dropped: bool = False, failures: tuple[str, ...] = ()) -> Scored:
    return Scored(task.group, task.index, task.draft, dropped, failures, task.tool_calls, task.failed_tool_calls)
