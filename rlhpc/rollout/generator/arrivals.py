"""Arrivals for an engine with `schedule: arrival`: weights, groups to start, answers of tools."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from rlhpc.parallel.board import Board
from rlhpc.rollout.collect import Collector
from rlhpc.rollout.generator.draws import Draws
from rlhpc.rollout.generator.messages import ROLL_CALL_KEY, FinishedGroup, Published, RollCall
from rlhpc.rollout.generator.shelf import call_key
from rlhpc.rollout.schedule.arrival import ArrivalSchedule
from rlhpc.rollout.schedule.terms import Terms

_LOOK_SECONDS, _LONGEST_LOOK_SECONDS = 0.02, 1.0  # between two looks for a roll call, by engine


class Arrivals:
    """Reports to the schedule of one engine what has arrived, on its first rank."""

    def __init__(self, schedule: ArrivalSchedule, board: Board, terms: Terms, engine: int) -> None:
        self._schedule, self._filtered = schedule, terms.filtered
        self._draws = Draws(board, schedule.version, engine, filtered=terms.filtered, engines=terms.engines)

    def look(self, published: Callable[[int], Published | None], collector: Collector) -> None:
        """Looks what is new; takes microseconds if nothing is. ``published``: finds a version whose weights have
        arrived."""
        schedule = self._schedule
        if published(schedule.version + 1) is not None:
            schedule.offer_version()
        if schedule.open_calls:
            arrived = {call_key(place) for place in collector.answered()}
            for key in schedule.open_calls:
                if key in arrived:
                    schedule.offer_answer(key)
        if schedule.wants_group and (group := self._draws.draw()) is not None:
            schedule.offer_group(group)

    def switched(self, version: int) -> None:
        """The engine has taken over a version."""
        self._draws.switch(version)

    @property
    def drawn(self) -> list[int]:
        """Groups that were drawn and have not started."""
        offered = self._schedule.offered_group
        return [*self._draws.reserved, *([offered] if offered is not None else [])]

    def drop(self, groups: Sequence[FinishedGroup]) -> None:
        """Counts those that the filter has dropped."""
        if self._filtered:
            self._draws.drop(sum(not group.keeps for group in groups))


class RollCalls:
    """The trainers' roll calls, as one engine sees them."""

    def __init__(self, board: Board, engines: int) -> None:
        self._board, self._seconds = board, min(_LOOK_SECONDS * engines, _LONGEST_LOOK_SECONDS)
        self._looked, self._number = time.monotonic(), -1

    def look(self) -> RollCall | None:
        """A roll call that has not been answered; None without one, and between two looks."""
        if time.monotonic() < self._looked + self._seconds:
            return None
        self._looked = time.monotonic()
        found = self._board.read([ROLL_CALL_KEY]).get(ROLL_CALL_KEY)
        if found is None or found["number"] <= self._number:
            return None
        call = RollCall.from_json(found)
        self._number = call.number
        return call
