"""Collects one engine's responses; keeps those without a place in it, so that other engines can take them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from rlhpc.rollout.collect import Collector, Place, Scored, Stepped
from rlhpc.rollout.dealing import EngineReport
from rlhpc.rollout.requests import Task
from rlhpc.rollout.schedule.response_order import Unfinished


class QueuedCollector(Collector):
    """A collector that submits a response once one of the engine's ``slots`` is free.

    Next turns of responses whose tools have answered are submitted at once.
    """

    def __init__(self, *arguments: Any, slots: int, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._slots = slots
        self.waiting: list[Task] = []  # in the order in which they are submitted
        self._ended: list[tuple[Place, int]] = []
        self.steps = 0
        self._submitted: dict[Place, int] = {}  # engine steps before

    @property
    def in_flight(self) -> int:
        """See ``Collector``; those that wait, too."""
        return super().in_flight + len(self.waiting)

    def begin(self, tasks: Sequence[Task]) -> None:
        """See ``Collector``."""
        self._unfinished.update(task.group for task in tasks)
        self.waiting += tasks

    def step(self) -> Stepped:
        """See ``Collector``."""
        self._fill()
        self.steps += 1
        return super().step()

    def run(self, steps: int, *, takes_replies: bool) -> None:
        """At most ``steps`` engine steps; fewer if nothing is left that can be generated. Does not wait for tools;
        ``takes_replies``: continues with those that have answered, so that what is finished depends on their time."""
        while steps and (self.tasks or self.waiting):
            self.step()
            if self._calling and self.tasks and takes_replies:
                self._take_replies(in_steps=False)
            steps -= 1

    def report(self, *, tokens: bool) -> EngineReport:
        """Requests that can run now, and lengths of responses ended since the last report. ``tokens``: with the exact
        tokens of running responses, after a step in flight on the device; else as many as steps since they began."""
        if tokens:
            self.switch(self._version)
        running = [
            Unfinished(_place(task), task.draft.sampled_len + (0 if tokens else self._steps_of(task)), running=True)
            for task in self.tasks.values()
        ]
        waiting = [Unfinished(_place(task), task.draft.sampled_len, running=False) for task in self.waiting]
        ended, self._ended = tuple(self._ended), []
        return EngineReport((*running, *waiting), ended)

    def withdraw(self, places: Collection[Place]) -> list[Task]:
        """Gives up responses, with what they have generated, which another engine goes on with."""
        gone = self._taken(places)
        self._unfinished.subtract(task.group for task in gone)
        for task in gone:
            self._leave(task)
        return gone

    def arrange(self, order: Sequence[Place], arrived: Sequence[Task]) -> None:
        """Takes responses of other engines. From now on the first of ``order`` run, and the others wait, in order."""
        self.begin(arrived)
        last = set(order[self._slots :])
        put_back = self._taken([_place(task) for task in self.tasks.values() if _place(task) in last])
        rank = {place: number for number, place in enumerate(order)}
        self.waiting = sorted([*self.waiting, *put_back], key=lambda task: rank[_place(task)])

    def stop(self) -> list[Scored]:
        """See ``Collector``."""
        waiting, self.waiting = self.waiting, []
        for task in waiting:
            self._leave(task)
        found = [*super().stop(), *(Scored(task.group, task.index, task.draft) for task in waiting)]
        return sorted(found, key=lambda scored: (scored.group, scored.index))

    def _taken(self, places: Collection[Place]) -> list[Task]:
        """Removes responses from those that wait and from the engine."""
        wanted = set(places)
        waiting = [task for task in self.waiting if _place(task) in wanted]
        self.waiting = [task for task in self.waiting if _place(task) not in wanted]
        return waiting + self._withdraw([key for key, task in self.tasks.items() if _place(task) in wanted])

    def _fill(self) -> None:
        """Submits those that have a place now."""
        room = max(0, self._slots - len(self.tasks))
        for task in self.waiting[:room]:
            self._submit(task)
        del self.waiting[:room]

    def _steps_of(self, task: Task) -> int:
        return self.steps - self._submitted[_place(task)]

    def _request(self, task: Task) -> None:
        self._submit(task)

    def _submit(self, task: Task) -> None:
        self._submitted[_place(task)] = self.steps
        super()._request(task)

    def _end(self, task: Task, key: int) -> None:
        self._ended.append((_place(task), task.draft.sampled_len))
        super()._end(task, key)


def _place(task: Task) -> Place:
    return task.group, task.index
