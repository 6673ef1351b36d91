"""Pots on the board (``rlhpc.rollout.schedule.pots``), and the counters by which engines draw groups from them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from rlhpc.parallel.board import Board
from rlhpc.rollout.schedule.pots import Pot

_DROPPED = "dropped"  # counter of groups that the filter has dropped in this attempt
_CLOSED = 1 << 40  # what closing adds to a counter: more than it can have places
_LOOK_SECONDS = 0.02  # between two looks at what may change, by engine


def _dropped_by(engine: int) -> str:
    return f"dropped/{engine}"


def _pot(version: int) -> str:
    return f"pot/{version}"


def _drawn(version: int) -> str:
    return f"pot/{version}/drawn"


def _orphans(version: int) -> str:
    return f"pot/{version}/orphans"


def _lost(number: int) -> str:
    return f"lost/{number}"


def _drawn_lost(number: int) -> str:
    return f"lost/{number}/drawn"


@dataclass
class _Present:
    """The pot of the present version, as an engine knows it."""

    version: int
    pot: Pot | None = None  # None: not found yet
    limit: int = 0
    reserved: int | None = None  # a place that this engine has drawn, perhaps beyond the limit
    closed: bool = False
    looked: float = float("-inf")

    def find(self, board: Board) -> Pot | None:
        """Looks for the pot."""
        found = board.read([_pot(self.version)]).get(_pot(self.version))
        if found is not None:
            self.pot = Pot.from_json(found)
            self.limit = self.pot.limit(self.pot.dropped)
        return self.pot


class Draws:
    """One engine's draws. Another engine may draw at any time; no place is drawn twice."""

    def __init__(self, board: Board, version: int, engine: int, *, filtered: bool, engines: int) -> None:
        """``version``: that of the engine's weights; ``filtered``: pots grow with the groups that are dropped."""
        self._board, self._filtered, self._seconds = board, filtered, _LOOK_SECONDS * engines
        self._own_drops = _dropped_by(engine)
        self._former: tuple[Pot, int] | None = None  # the pot before, and a place that was reserved of it
        self._lists = 0  # of lost groups, that have been drawn from to the end
        self._now = _Present(version)

    def draw(self) -> int | None:
        """A group to start with the present version; None if there is none now."""
        now = self._now
        look = time.monotonic() > now.looked + self._seconds
        if look:
            now.looked = time.monotonic()
        pot = now.pot or (now.find(self._board) if look else None)
        if pot is None:
            return None
        if self._former is not None:
            (before, place), self._former = self._former, None
            if place < pot.former_places:
                return before.group(place)
        if look and (lost := self._draw_lost()) is not None:
            return lost
        if now.reserved is None and not now.closed and (now.limit > 0 or self._filtered):
            place = self._board.add(_drawn(now.version), 1) - 1
            now.closed = place >= _CLOSED
            now.reserved = None if now.closed else place
        if now.reserved is None or not self._within(pot, now.reserved, look=look):
            return None
        group, now.reserved = pot.group(now.reserved), None
        return group

    def switch(self, version: int) -> None:
        """Draws from the pot of the next version from now on."""
        if self._now.pot is not None and self._now.reserved is not None:
            self._former = self._now.pot, self._now.reserved
        self._now = _Present(version)

    @property
    def reserved(self) -> list[int]:
        """Groups of places that this engine has drawn and not started. A place beyond the end of a closed pot is none:
        the next pot has a group of its number."""
        places = [self._former] if self._former is not None else []
        if self._now.pot is not None and self._now.reserved is not None:
            places.append((self._now.pot, self._now.reserved))
        return [pot.group(place) for pot, place in places if self._counts(pot, place)]

    def _counts(self, pot: Pot, place: int) -> bool:
        """True if a place is one of its pot, as far as that is known."""
        later = self._board.read([_pot(pot.version + 1)]).get(_pot(pot.version + 1))
        return later is None or place < Pot.from_json(later).former_places

    def drop(self, groups: int) -> None:
        """Counts groups that the filter has dropped."""
        if groups:
            self._board.add(self._own_drops, groups)
            self._board.add(_DROPPED, groups)

    def _draw_lost(self) -> int | None:
        """One of the groups that lost engines have left, if there are some."""
        number = self._lists
        lost = self._board.read([_lost(number)]).get(_lost(number))
        if lost is None or lost["version"] > self._now.version:
            return None
        place, groups = self._board.add(_drawn_lost(number), 1) - 1, lost["groups"]
        self._now.looked = float("-inf")  # there may be more
        if place >= len(groups):
            self._lists += 1
            return None
        group: int = groups[place]
        return group

    def _within(self, pot: Pot, place: int, *, look: bool) -> bool:
        """True if a group of that place may start."""
        now = self._now
        if place >= now.limit and self._filtered and look and not now.closed:
            dropped, key = self._board.add(_DROPPED, 0), _orphans(now.version)
            limit = pot.limit(dropped, self._board.read([key]).get(key, []))
            # In this order: if the pot is still open now, the trainers count at least as many dropped groups as that.
            now.closed = self._board.add(_drawn(now.version), 0) >= _CLOSED
            now.limit = now.limit if now.closed else limit
        return place < now.limit


def post_pot(board: Board, pot: Pot) -> None:
    """Opens a pot."""
    board.post(_pot(pot.version), pot.to_json())


def post_orphans(board: Board, version: int, places: Sequence[int]) -> None:
    """Names places of a pot that nobody uses."""
    if places:
        board.post(_orphans(version), [*places])


def close_pot(board: Board, version: int) -> tuple[int, int]:
    """Ends the draws from the pot of a version: the number of places that were drawn of it, and of groups dropped so
    far."""
    drawn = board.add(_drawn(version), _CLOSED) - _CLOSED
    return drawn, board.add(_DROPPED, 0)


def count_drawn(board: Board, version: int) -> tuple[int, int]:
    """Result of ``close_pot`` for a pot that stays open."""
    return board.add(_drawn(version), 0), board.add(_DROPPED, 0)


def add_drops(board: Board, groups: int) -> int:
    """Counts as dropped what no engine counts; returns the number of dropped groups so far."""
    return board.add(_DROPPED, groups)


def correct_drops(board: Board, engine: int, delivered: int) -> None:
    """A lost engine has counted groups as dropped that it has not delivered: ``delivered`` is the number of those that
    it has. They do not count, because they are started again."""
    board.add(_DROPPED, delivered - board.add(_dropped_by(engine), 0))
    board.drop(_dropped_by(engine))


def forget_pot(board: Board, version: int) -> None:
    """Removes a pot, from which no engine draws any more."""
    for key in (_pot(version), _drawn(version), _orphans(version)):
        board.drop(key)


class LostGroups:
    """Lists of groups that lost engines have left, on the board: the others start them again."""

    def __init__(self, board: Board) -> None:
        self._board, self._lists = board, list[Sequence[int]]()

    def post(self, version: int, groups: Sequence[int]) -> None:
        """Lets engines start groups, with ``version`` or a later one."""
        self._board.post(_lost(len(self._lists)), {"version": version, "groups": [*groups]})
        self._lists.append(groups)

    def waiting(self) -> set[int]:
        """Those that no engine has drawn yet."""
        found: set[int] = set()
        for number, groups in enumerate(self._lists):
            found |= {*groups[self._board.add(_drawn_lost(number), 0) :]}
        return found
