"""Deals a step's responses to the engines of all ranks while more wait than run (``rlhpc.rollout.dealing``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from rlhpc.core import spans
from rlhpc.parallel.transfer import gather_objects, give_objects
from rlhpc.rollout.dealing import Deal, EngineReport, Rules, deal
from rlhpc.rollout.queued import QueuedCollector
from rlhpc.rollout.requests import Task
from rlhpc.rollout.schedule.response_order import ExpectedLengths
from rlhpc.trainer.roles import EngineRank


@dataclass
class Dealer:
    """The responses of all engines, of which this rank's are in ``collector``. ``begin`` and ``advance`` are collective
    while responses wait for a place; whether they do is known to all ranks.

    ``interval``: engine steps between two deals.
    """

    collector: QueuedCollector
    place: EngineRank
    rules: Rules
    expected: ExpectedLengths
    interval: int
    moved: int = 0  # responses that changed engines, over all of them
    put_back: int = 0  # times that a running response let others run, over all of them
    waiting: int = 0  # maximum that waited after a deal, over all of them
    _waits: bool = field(default=False, init=False)
    _left: int = field(default=0, init=False)  # engine steps until the next deal

    def begin(self, tasks: Sequence[Task], most: int) -> None:
        """Begins this engine's share; ``most``: responses in the largest share of an engine."""
        self.collector.begin(tasks)
        self._waits = most > self.rules.slots
        if self._waits:
            self._deal()

    def advance(self, steps: int | None = None) -> None:
        """Generates until all responses are finished, or ``steps`` tokens of each."""
        while self._waits and steps != 0:
            count = self._left if steps is None else min(steps, self._left)
            self.collector.run(count, takes_replies=steps is None)
            self._left -= count
            steps = None if steps is None else steps - count
            if not self._left:
                self._deal()
        self.collector.advance(steps)

    def _deal(self) -> None:
        rules, engine = self.rules, self.place.index
        with spans.part("deal", waits=True):
            mine = self.collector.report(tokens=rules.turn is not None)
            reports = [report for report in gather_objects(mine if self.place.leads else None) if report is not None]
            self.expected.note((group, length) for report in reports for (group, _), length in report.ended)
            dealt = deal(reports, rules, self.expected)
            arrived = self._swapped(reports, dealt)
            self.collector.arrange(dealt.engines[engine], arrived)
        running = {one.place for report in reports for one in report.unfinished if one.running}
        self.waiting = max(self.waiting, sum(len(hand[rules.slots :]) for hand in dealt.engines))
        self.put_back += sum(place in running for hand in dealt.engines for place in hand[rules.slots :])
        self._waits, self._left = dealt.waits, self.interval

    def _swapped(self, reports: Sequence[EngineReport], dealt: Deal) -> list[Task]:
        """Sends responses that other engines get, and returns those that this one gets."""
        held = {one.place: engine for engine, report in enumerate(reports) for one in report.unfinished}
        to = {place: engine for engine, hand in enumerate(dealt.engines) for place in hand}
        moving = [place for place, engine in held.items() if engine != to[place]]
        self.moved += len(moving)
        if not moving:
            return []
        own = self.place.index
        leaving: dict[int, list[Task]] = {}
        for task in self.collector.withdraw([place for place in moving if held[place] == own]):
            leaving.setdefault(to[task.group, task.index], []).append(task)
        given: dict[int, list[Task]] = {}
        if self.place.leads:
            for engine, tasks in leaving.items():
                first, *others = range(engine * self.place.tp, (engine + 1) * self.place.tp)
                given[first] = tasks
                given |= {rank: [_without_routed_experts(task) for task in tasks] for rank in others}
        found = give_objects(given)
        return [task for rank in sorted(found) for task in found[rank]]


def _without_routed_experts(task: Task) -> Task:
    return replace(task, draft=replace(task.draft, routed_experts=None))
