"""Requests that an engine lends to engines on trainers' ranks (lenders) while these would wait: both ends.

At its switch to a version an engine gives each of its lenders requests from the end of its order. A lender continues
them with that version, for a virtual time, and returns all of them. Rewards, tools and verdicts remain the engine's.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlhpc.api import RolloutEngine
from rlhpc.parallel.channel import ObjectChannel
from rlhpc.rollout.collect import Collector
from rlhpc.rollout.generator.messages import Lent, Returned
from rlhpc.rollout.requests import Sampling, Task
from rlhpc.rollout.schedule.actions import Lend
from rlhpc.rollout.schedule.terms import Terms


class LentRequests:
    """An engine's end, on each of its ranks. Only the first has ``channels``: to its lenders, in their order; none if
    lenders have no time to generate."""

    def __init__(self, terms: Terms, engine: int, channels: Sequence[ObjectChannel]) -> None:
        self._lenders, self._channels = terms.lenders_of(engine), channels
        self._lender_of = {channel.peer: lender for lender, channel in zip(self._lenders, channels, strict=False)}
        self._returned: dict[int, Returned] = {}
        self._version = -1

    def lend(self, collector: Collector, action: Lend, version: int, policy_version: int) -> int:
        """Withdraws requests and sends them; returns how many each lender gets: fewer than the schedule knows of, if
        some have ended with a step in flight on the device."""
        self._version = version
        count = min(action.requests, collector.requests // (1 + len(self._lenders)))
        tasks = collector.lend(count * len(self._lenders))
        for place, channel in enumerate(self._channels):
            mine = tasks[place * count : (place + 1) * count]
            channel.send(Lent(version, policy_version, action.nanoseconds, mine))
        return count

    def returned(self, lender: int) -> Returned | None:
        """Results of a lender, once; None if they are not here yet. On the first rank."""
        for channel in self._channels:
            for peer, message in channel.inbox.take():
                self._returned[self._lender_of[peer]] = message
        found = self._returned.pop(lender, None)
        assert found is None or found.version == self._version, f"requests of another version than {self._version}"
        return found


def continued(engine: RolloutEngine, sampling: Sampling, lent: Lent, terms: Terms) -> Returned:
    """Continues requests on a lender's engine for their virtual time, until the first step that reaches its end. All
    ranks of the lender run it alike. ``sampling``: of the run's responses."""
    collector = _Turns(engine, sampling, lent.policy_version)
    collector.begin(lent.tasks)
    left = lent.nanoseconds
    while collector.requests and left > 0:
        left -= terms.costs.engine_step(min(collector.requests, terms.slots))
        collector.step()
    collector.switch(lent.policy_version)  # takes what has ended with a step in flight on the device
    unfinished = collector.lend(collector.requests)
    places = {(task.group, task.index): place for place, task in enumerate(lent.tasks)}

    def in_order(tasks: Sequence[Task]) -> list[Task]:
        return sorted(tasks, key=lambda task: places[task.group, task.index])

    return Returned(lent.version, in_order(collector.turns), in_order(unfinished))


def sampled_tokens(lent: Lent, returned: Returned) -> int:
    """Number of tokens that a lender has sampled."""
    after = sum(task.draft.response_len for task in (*returned.ended, *returned.unfinished))
    return max(0, after - sum(task.draft.response_len for task in lent.tasks))  # below: turns began again


class _Turns(Collector):
    """Collects turns that have ended; neither tools nor reward workers get them here."""

    def __init__(self, engine: RolloutEngine, sampling: Sampling, policy_version: int) -> None:
        super().__init__(engine, sampling, None, policy_version)
        self.turns: list[Task] = []

    def _end_turn(self, task: Task, key: int) -> None:
        self.turns.append(task)
