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
        self._waiting: list[Task] = []  # in the order in which they are submitted
        self._ended: list[tuple[Place, int]] = []
        self._steps = 0
        self._submitted: dict[Place, int] = {}  # engine steps before

    @property
    def in_flight(self) -> int:
        """See ``Collector``; those that wait, too."""
        return super().in_flight + len(self._waiting)

    def begin(self, tasks: Sequence[Task]) -> None:
        """See ``Collector``."""
        self._unfinished.update(task.group for task in tasks)
        self._waiting += tasks

    def step(self) -> Stepped:
        """See ``Collector``."""
        self._fill()
        self._steps += 1
        return super().step()

    def run(self, steps: int, *, takes_replies: bool) -> None:
        """At most ``steps`` engine steps; fewer if nothing is left that can be generated. Does not wait for tools;
        ``takes_replies``: continues with those that have answered, so that what is finished depends on their time."""
        while steps and (self._requests or self._waiting):
            self.step()
            if self._calling and self._requests and takes_replies:
                self._take_replies(in_steps=False)
            steps -= 1

    def report(self, *, tokens: bool) -> EngineReport:
        """Requests that can run now, and lengths of responses ended since the last report. ``tokens``: with the exact
        tokens of running responses, after a step in flight on the device; else as many as steps since they began."""
        if tokens:
            self.switch(self._version)
        running = [
            Unfinished(_place(task), task.draft.sampled_len + (0 if tokens else self._steps_of(task)), running=True)
            for task in self._requests.values()
        ]
        waiting = [Unfinished(_place(task), task.draft.sampled_len, running=False) for task in self._waiting]
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
        put_back = self._taken([_place(task) for task in self._requests.values() if _place(task) in last])
        rank = {place: number for number, place in enumerate(order)}
        self._waiting = sorted([*self._waiting, *put_back], key=lambda task: rank[_place(task)])

    def stop(self) -> list[Scored]:
        """See ``Collector``."""
        waiting, self._waiting = self._waiting, []
        for task in waiting:
            self._leave(task)
        found = [*super().stop(), *(Scored(task.group, task.index, task.draft) for task in waiting)]
        return sorted(found, key=lambda scored: (scored.group, scored.index))

    def _taken(self, places: Collection[Place]) -> list[Task]:
        """Removes responses from those that wait and from the engine."""
        wanted = set(places)
        waiting = [task for task in self._waiting if _place(task) in wanted]
        self._waiting = [task for task in self._waiting if _place(task) not in wanted]
        return waiting + self._withdraw([key for key, task in self._requests.items() if _place(task) in wanted])

    def _fill(self) -> None:
        """Submits those that have a place now."""
        room = max(0, self._slots - len(self._requests))
        for task in self._waiting[:room]:
            self._submit(task)
        del self._waiting[:room]

    def _steps_of(self, task: Task) -> int:
        return self._steps - self._submitted[_place(task)]

    def _request(self, task: Task) -> None:
        self._submit(task)

    def _submit(self, task: Task) -> None:
        self._submitted[_place(task)] = self._steps
        super()._request(task)

    def _end(self, task: Task, key: int) -> None:
        self._ended.append((_place(task), task.draft.sampled_len))
        super()._end(task, key)


def _place(task: Task) -> Place:
    return task.group, task.index
