"""Knowledge of an engine about all engines, and its consequences: due times of versions, and how early anything else
can happen."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf

from rlhpc.rollout.schedule.terms import Terms

Time = float  # nanoseconds: an int, or inf


@dataclass
class EngineView:
    """An engine at some moment, which may be over; it never goes back."""

    version: int
    clock: int
    busy: bool  # has requests
    call: Time  # when its next tool call is answered, or its lenders return requests
    group: int  # that it starts next
    settled: int  # newest version whose due time it knows
    read: int = 0  # number of its facts that have been read
    number: int = 0  # of the news that it is from


def batch_end(terms: Terms, drops: Sequence[int], first: int) -> int:
    """End of the batch that begins with group ``first`` if of all groups only ``drops``, in order, are dropped."""
    size, before = terms.groups_per_step, bisect_left(drops, first)
    end = first + size
    while (found := first + size + bisect_left(drops, end) - before) > end:
        end = found
    return min(end, first + terms.batch_limit) if terms.batch_limit else end


def first_too_early(terms: Terms, drops: Sequence[int], version: int, first: int) -> int:
    """First group that may not start with ``version``, whose step trains on the groups from ``first`` on."""
    last = min(version + terms.max_staleness, terms.steps - 1)
    if not drops:
        return first + (last - version + 1) * terms.groups_per_step
    for _ in range(version, last + 1):
        first = batch_end(terms, drops, first)
    return first


class Knowledge:
    """Ends and verdicts of groups, by which batches are settled: their groups and the next version's due time."""

    def __init__(self, terms: Terms, version: int, due: int, first: int) -> None:
        self._terms = terms
        self._due, self._firsts = {version: due}, {version: first}
        self.settled = version  # newest version whose due time is known
        self.ends: dict[int, int] = {}  # group -> virtual time
        self._unjudged: set[int] = set()  # ended groups without a verdict
        self._drops: list[int] = []  # known ones, in order
        self._latest = 0  # end of the groups that the next batch to settle surely has
        self._open = [first + (engine - first) % terms.engines for engine in range(terms.engines)]
        self._to_come: list[tuple[int, int]] = []  # drops that do not count yet: (when, group)
        self.counting: list[int] = []  # drops that count, in order

    # --- facts

    def end(self, group: int, time: int) -> None:
        """A group has ended."""
        if group < self._firsts[min(self._firsts)] or group in self.ends:
            return
        self.ends[group] = time
        if self._terms.filtered:
            self._unjudged.add(group)
        engines, engine = self._terms.engines, self._terms.engine_of(group)
        while self._open[engine] in self.ends:
            self._open[engine] += engines
        if group < self._firsts[self.settled] + self._terms.groups_per_step:
            self._latest = max(self._latest, time)

    def judge(self, group: int, *, keeps: bool) -> None:
        """An ended group has its verdict."""
        if group not in self._unjudged:
            return
        self._unjudged.remove(group)
        if not keeps:
            insort(self._drops, group)
            heappush(self._to_come, (self.ends[group] + self._terms.costs.train, group))

    def settle(self) -> None:
        """Closes the batches whose groups have all ended and been judged."""
        while self.settled < self._terms.steps:
            first, end = self._firsts[self.settled], self._sure_end()
            if min(self._open) < end or any(group < end for group in self._unjudged):
                return
            ended = max(self.ends[group] for group in range(first, end))
            due = max(self._due[self.settled] + self._terms.lend, ended) + self._terms.costs.train
            self.settled += 1
            self._due[self.settled], self._firsts[self.settled] = due, end
            near = (self.ends.get(group, 0) for group in range(end, end + self._terms.groups_per_step))
            self._latest = max(near, default=0)

    def forget(self, version: int) -> None:
        """Drops what concerns the batches before ``version``, which is settled."""
        old, first = min(self._firsts), self._firsts[version]
        for group in range(self._firsts[old], first):
            self.ends.pop(group, None)
        for drops in (self._drops, self.counting):
            del drops[: bisect_left(drops, first)]
        for former in range(old, version):
            del self._due[former], self._firsts[former]

    # --- what follows

    def due(self, version: int) -> int | None:
        """Due time of a version."""
        return self._due.get(version)

    def first(self, version: int) -> int:
        """First group of the batch that the step with ``version`` trains on."""
        return self._firsts[version]

    def batch_of(self, group: int) -> int | None:
        """The settled batch that has a group."""
        if not self._firsts[min(self._firsts)] <= group < self._firsts[self.settled]:
            return None
        return max(version for version, first in self._firsts.items() if first <= group)

    def count_drops(self, clock: int) -> list[int]:
        """Drops that count at ``clock``, which never goes back, in order."""
        while self._to_come and self._to_come[0][0] <= clock:
            group = heappop(self._to_come)[1]
            if group >= self._firsts[min(self._firsts)]:
                insort(self.counting, group)
        return self.counting

    def opening(self, group: int, version: int) -> Time:
        """Time at which enough of the known drops count to start ``group`` with ``version``; inf: not with these."""
        drops = list(self.counting)
        for when, drop in sorted(self._to_come):
            insort(drops, drop)
            if group < first_too_early(self._terms, drops, version, self._firsts[version]):
                return when
        return inf

    def horizon(self, views: Sequence[EngineView]) -> list[Time]:
        """For each engine a time before which none of its groups ends, but for the ends that are known.

        An engine's next end is one of its present work, or of a group that it starts after something known; or of one
        that it starts after another end that is not known, which is d later than the earliest of these.
        """
        costs = self._terms.costs
        shortest, found = costs.engine_step(1), []
        for engine in views:
            soonest: Time = max(engine.call, engine.clock)
            if engine.busy:
                soonest = min(soonest, engine.clock + shortest)
            else:
                soonest = min(soonest, self._start(engine) + shortest)
            found.append(soonest)
        last = min(found) + costs.train + shortest
        return [min(soonest, last) for soonest in found]

    def earliest_due(self, horizon: Sequence[Time]) -> Time:
        """Lower bound of the due time after the newest that is known."""
        sure = self._sure_end()
        last: Time = max(self._due[self.settled] + self._terms.lend, self._latest)
        for soonest, group in zip(horizon, self._open, strict=True):
            if group < sure:
                last = max(last, soonest)
        return last + self._terms.costs.train

    def earliest_drop(self, horizon: Sequence[Time], group: int, engine: int) -> Time:
        """Lower bound of when a drop before ``group`` counts that is not known yet, except by ends of ``engine``."""
        times = [self.ends[former] for former in self._unjudged if former < group]
        others = (soonest for place, soonest in enumerate(horizon) if place != engine and self._open[place] < group)
        return min(min(times, default=inf), min(others, default=inf)) + self._terms.costs.train

    def _sure_end(self) -> int:
        """End of the next batch to settle if no more of its groups are dropped."""
        return batch_end(self._terms, self._drops, self._firsts[self.settled])

    def _start(self, engine: EngineView) -> Time:
        """Lower bound of when an engine without requests starts a group if no group ends that has not ended yet."""
        if engine.version not in self._firsts:  # not yet where the others are: it does not wait for them
            return engine.clock
        steps = [(max(engine.clock, self._due[v]), v) for v in range(engine.version, self.settled + 1)]
        if not self._terms.filtered:
            return next((when for when, v in steps if engine.group < self._limit(v, ())), inf)
        return self._start_filtered(engine, steps)

    def _start_filtered(self, engine: EngineView, steps: Sequence[tuple[int, int]]) -> Time:
        """The same; groups without a verdict count as dropped."""
        delay, may_drop = self._terms.costs.train, (*self._drops, *self._unjudged)
        drops = sorted((max(engine.clock, self.ends[group] + delay), group) for group in may_drop)
        moments = sorted({when for when, _ in (*steps, *drops)})

        def can_start(moment: int) -> bool:
            version = max(v for when, v in steps if when <= moment)
            return engine.group < self._limit(version, sorted(group for when, group in drops if when <= moment))

        place = bisect_left(moments, 1, key=can_start)
        found: Time = moments[place] if place < len(moments) else inf
        if self._unjudged and min(self._open) >= self._sure_end():  # verdicts alone may settle the batch
            found = min(found, max(engine.clock, max(self._due[self.settled], self._latest) + delay))
        return found

    def _limit(self, version: int, drops: Sequence[int]) -> int:
        return first_too_early(self._terms, drops, version, self._firsts[version])
