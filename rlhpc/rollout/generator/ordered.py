"""Collects the responses of an engine with ranks of its own, in the order that ``EngineOrder`` gives them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlhpc.data.groups import Group
from rlhpc.rollout.collect import Draft, Stepped
from rlhpc.rollout.generator.messages import Published
from rlhpc.rollout.queued import QueuedCollector
from rlhpc.rollout.requests import Task
from rlhpc.rollout.schedule.engine_order import EngineOrder


class OrderedCollector(QueuedCollector):
    """A collector of which every response that has no slot of the engine waits here, until ``order`` has it run."""

    def __init__(self, *arguments: Any, slots: int, order: EngineOrder) -> None:
        super().__init__(*arguments, slots=slots)
        self._order = order
        self._most_waiting = self._turns_ended = 0

    @property
    def requests(self) -> int:
        """See ``Collector``; those that wait, too."""
        return super().requests + len(self.waiting)

    def expect(self, published: Published) -> None:
        """Takes what is expected of responses with a version from now on."""
        mean = published.mean_tokens or self._sampling.max_tokens / 4
        self._note_ended()
        self._order.switch(mean, dict(published.length_ratios), published.prompt_cursor, published.done)

    def note(self, groups: Sequence[Group]) -> None:
        """Notes the lengths of responses that had ended when a state was written."""
        for group in groups:
            samples = zip(group.samples, group.scored, strict=True)
            self._order.note((group.number, sample.sampled_len) for sample, scored in samples if scored)

    def deal(self) -> Stepped:
        """Before a step: has those run that are next, if a deal is due and matters. Returns what ended with the step in
        flight on the device, if there was one."""
        stepped = Stepped(0)
        self._fill()
        if self._order.is_due([task.group for task in self.waiting]):
            stepped = self.switch(self._version)
            self._fill()
            self._note_ended()
            self._arrange()
        self._order.stepped()
        self._most_waiting = max(self._most_waiting, len(self.waiting))
        return stepped

    def statistics(self) -> dict[str, float]:
        """See ``Collector``."""
        found = {"rollout/waiting_responses_max": self._most_waiting, "rollout/turns_ended": self._turns_ended}
        self._most_waiting = self._turns_ended = 0
        return {name: float(value) for name, value in found.items()}

    def lend(self, count: int) -> list[Task]:
        """See ``Collector``; those that wait are the last."""
        first = max(0, len(self.waiting) - count)
        waiting, self.waiting = self.waiting[first:], self.waiting[:first]
        return super().lend(count - len(waiting)) + waiting

    def drafts(self) -> list[Draft]:
        """See ``Collector``."""
        found = super().drafts()
        calling = len(found) - len(self._calling)
        return [*found[:calling], *(Draft(task, calls=False) for task in self.waiting), *found[calling:]]

    def set_aside(self) -> None:
        """See ``Collector``."""
        super().set_aside()
        self._aside[0].extend(self.waiting)
        self.waiting = []

    def forget_calls(self) -> None:
        """See ``Collector``; also forgets what has ended."""
        super().forget_calls()
        self._ended = []
        self._order.restart()

    def abandon(self) -> None:
        """See ``Collector``."""
        for task in self.waiting:
            self._leave(task)
        self.waiting = []
        super().abandon()

    def _arrange(self) -> None:
        """Deals responses to places of the engine."""
        responses = self.report(tokens=True).unfinished
        places = self._order.ordered(responses)
        running = {response.place for response in responses if response.running}
        self._turns_ended += len(running.intersection(places[self._slots :]))
        self.arrange(places, [])
        self._fill()

    def _note_ended(self) -> None:
        """Notes what has ended, but for answers to held-out prompts."""
        ended, self._ended = self._ended, []
        self._order.note((group, length) for (group, _), length in ended if group >= 0)

    def _request(self, task: Task) -> None:
        self.waiting.append(task)
