"""Groups of a step's batch with `schedule: arrival`: those that were finished first, within the bound."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlhpc.rollout.schedule.batches import ClosedBatch
from rlhpc.rollout.schedule.pots import Pot
from rlhpc.rollout.schedule.terms import Terms

Source = tuple[int, int]  # an engine, and how often it was started before


@dataclass(frozen=True)
class TakenGroups:
    """Position of a run in its prompts: groups before ``cursor`` are done, those of ``done`` as well, and of others
    that have started the last step that may train on them is in ``deadlines``. Part of a checkpoint."""

    cursor: int = 0
    done: tuple[int, ...] = ()
    deadlines: Mapping[int, int] = field(default_factory=dict)
    in_order: bool = True  # batches so far were formed in the order of groups

    def to_json(self) -> dict[str, Any]:
        return {"done": [*self.done], "deadlines": [[group, step] for group, step in sorted(self.deadlines.items())]}

    @classmethod
    def from_json(cls, cursor: int, record: Mapping[str, Any] | None) -> TakenGroups:
        """``record``: None if the run has trained on all groups before ``cursor``, and on no others."""
        if record is None:
            return cls(cursor)
        return cls(cursor, tuple(record["done"]), dict(record["deadlines"]), in_order=False)


@dataclass(frozen=True)
class RecordedBatch:
    """The groups that a recorded step trained on, and those that were dropped before, ascending; who delivered each."""

    kept: tuple[int, ...]
    dropped: tuple[int, ...]
    sources: Mapping[int, Source] = field(default_factory=dict)


class ArrivalBatches:
    """Opens pots and forms batches, each within the bound in any order of what engines do.

    A group that starts with version v must be trained on in step v + max_staleness or before. Of those whose last step
    is d or before, at most ``groups_per_step`` x (d - s + 1) are left when step s begins. A pot is as large as that
    allows, and a batch takes what must not be left to later steps, then what was finished first.
    """

    def __init__(self, terms: Terms, number: int, taken: TakenGroups, held: Iterable[int] = ()) -> None:
        """Begins with step ``number`` (from 0). ``held``: groups that resumed engines have; those between them that
        neither they nor the trainers have are started again."""
        self._terms, self.number = terms, number
        self._cursor, self._done = taken.cursor, set(taken.done)
        here = {group for group in held if not self._is_done(group)}
        self._next = 1 + max((*here, *self._done, self._cursor - 1))
        gone = (group for group in range(self._cursor, self._next) if group not in here and not self._is_done(group))
        self._again = tuple(gone)
        self._deadlines = self._deadlines_of(sorted(here), taken)  # of groups that have started and are not done
        self._pot: Pot | None = None
        self._orphans: set[int] = set()  # places of the pot that lost engines had drawn beyond its limit
        self._open = len(here)  # started in all, less those that were trained on
        self._ready: dict[int, None] = {}  # finished and kept, in order of arrival
        self._dropped: list[int] = []  # since the last batch

    def open_pot(self, version: int, drawn: int, dropped: int) -> Pot:
        """The pot of the next version. ``drawn``: places that were drawn of the former pot, with and without a group;
        ``dropped``: groups that engines have counted as dropped in this attempt."""
        terms, before, places = self._terms, self._pot, 0
        if before is not None:
            places = min(drawn, before.limit(dropped, self._orphans))
            orphans = [before.group(place) for place in sorted(self._orphans) if place < places]
            for group in before.groups(places):
                if not self._is_done(group) and group not in orphans:
                    self._deadlines.setdefault(group, before.version + terms.max_staleness)
            self._next += max(0, places - len(before.again))
            self._again, self._orphans = (*orphans, *before.again[places:]), set()
            self._open += places - len(orphans)
        steps = version + terms.max_staleness + 1 - self.number  # that may train on a group which starts now
        count = terms.groups_per_step * steps - (self._open - dropped)
        self._pot = Pot(version, self._next, max(0, count), self._again, dropped, places)
        return self._pot

    def lose(self, held: Collection[int], waiting: Collection[int], drawn: int, dropped: int) -> list[int]:
        """Groups that have started and that nobody has any more: they are to be started again, with the version of the
        present pot or a later one.

        ``held``: what engines have, with places of the pot that they have drawn and not used; ``waiting``: lost groups
        that no engine has started again yet; ``drawn``, ``dropped``: as for ``open_pot``, counted before ``held``.
        """
        pot = self._pot
        assert pot is not None, "no engine has begun"
        within = min(drawn, pot.limit(dropped, self._orphans))
        orphans = {pot.group(place) for place in self._orphans}
        started = {*self._deadlines, *pot.groups(within)} - orphans - {*held} - {*waiting} - self._ready.keys()
        lost = sorted(group for group in started if not self._is_done(group))
        self._orphans |= {place for place in range(within, drawn) if pot.group(place) not in held}
        self._deadlines |= dict.fromkeys(lost, pot.version + self._terms.max_staleness)
        return lost

    @property
    def orphans(self) -> list[int]:
        """Places of the present pot that lost engines had drawn and nobody uses, ascending."""
        return sorted(self._orphans)

    def judge(self, group: int, keeps: bool = True) -> None:  # noqa: FBT001, FBT002
        """Adds a finished group; again is allowed."""
        if self._is_done(group) or group in self._ready:
            return
        if keeps:
            self._ready[group] = None
        else:
            self._finish(group)
            self._dropped.append(group)

    def close(self) -> ClosedBatch | None:
        """The next batch, once all that it needs is there."""
        selected = self._selected()
        if selected is None:
            return None
        for group in selected:
            self._finish(group)
            del self._ready[group]
        while self._cursor in self._done:
            self._done.remove(self._cursor)
            self._cursor += 1
        self._open -= len(selected)
        batch = ClosedBatch(self.number, self._cursor, tuple(sorted(selected)), tuple(sorted(self._dropped)))
        self.number, self._dropped = self.number + 1, []
        return batch

    def overdue(self) -> list[int]:
        """Groups that hold up the next batch: it must not leave them, or so many of them, to later ones."""
        for last in range(self.number, self.number + self._terms.max_staleness):
            due = [group for group, deadline in self._deadlines.items() if deadline <= last]
            waiting = [group for group in due if group not in self._ready]
            if len(due) - self._terms.groups_per_step * (last - self.number) > len(due) - len(waiting):
                return waiting
        return []

    def is_done(self, group: int) -> bool:
        """True if a group was trained on or dropped."""
        return self._is_done(group)

    @property
    def taken(self) -> TakenGroups:
        """Position of the run in its prompts."""
        return TakenGroups(self._cursor, tuple(sorted(self._done)), dict(self._deadlines), in_order=False)

    def _selected(self) -> list[int] | None:
        """Groups of the next batch, None if they are not there yet."""
        terms, step = self._terms, self.number
        selected: dict[int, None] = {}
        for last in range(step, step + terms.max_staleness):
            due = [group for group, deadline in self._deadlines.items() if deadline <= last]
            missing = len(due) - terms.groups_per_step * (last - step) - sum(group in selected for group in due)
            if missing > 0:
                found = [group for group in self._first(selected) if self._deadlines.get(group, last + 1) <= last]
                if len(found) < missing:
                    return None
                selected |= dict.fromkeys(found[:missing])
        assert len(selected) <= terms.groups_per_step, f"step {step} would have to train on {len(selected)} groups"
        selected |= dict.fromkeys(self._first(selected)[: terms.groups_per_step - len(selected)])
        seen, limit = len(self._ready) + len(self._dropped), terms.batch_limit
        return list(selected) if len(selected) == terms.groups_per_step or (limit and seen >= limit) else None

    def _first(self, selected: Mapping[int, None]) -> Sequence[int]:
        """The finished groups that are not selected, in order of arrival."""
        return [group for group in self._ready if group not in selected]

    def _finish(self, group: int) -> None:
        self._done.add(group)
        self._deadlines.pop(group, None)

    def _is_done(self, group: int) -> bool:
        return group < self._cursor or group in self._done

    def _deadlines_of(self, held: Sequence[int], taken: TakenGroups) -> dict[int, int]:
        """The last step for each group that an engine has at the beginning: in a run whose groups were trained on in
        order that of its place among them; else as saved, or that of the newest pot."""
        terms = self._terms
        if taken.in_order:
            return {group: self.number + place // terms.groups_per_step for place, group in enumerate(held)}
        newest = self.number - 1 + terms.max_staleness
        return {group: taken.deadlines.get(group, newest) for group in held}


class ReplayedBatches:
    """The batches of a recorded run, whose engines draw no groups."""

    def __init__(self, batches: Mapping[int, RecordedBatch], number: int, taken: TakenGroups) -> None:
        """``batches``: by step, from 0."""
        self._batches, self.number = batches, number
        self._cursor, self._done = taken.cursor, set(taken.done)
        self._found: dict[int, bool] = {}
        self._sources = {group: source for batch in batches.values() for group, source in batch.sources.items()}

    def is_from(self, group: int, source: Source) -> bool:
        """True if the run has a group from this engine, in this life of it."""
        return self._sources.get(group) == source

    def open_pot(self, version: int, drawn: int, dropped: int) -> Pot:
        """A pot without groups."""
        return Pot(version, 0, 0)

    def judge(self, group: int, keeps: bool = True) -> None:  # noqa: FBT001, FBT002
        """Adds a finished group."""
        self._found[group] = keeps

    def close(self) -> ClosedBatch | None:
        """The next batch, once all of its groups are there."""
        recorded = self._batches[self.number]
        wanted = dict.fromkeys(recorded.kept, True) | dict.fromkeys(recorded.dropped, False)
        if not self._found.keys() >= wanted.keys():
            return None
        for group, keeps in wanted.items():
            assert self._found.pop(group) == keeps, f"group {group} has another verdict than in the record"
        self._done |= wanted.keys()
        while self._cursor in self._done:
            self._done.remove(self._cursor)
            self._cursor += 1
        batch = ClosedBatch(self.number, self._cursor, recorded.kept, recorded.dropped)
        self.number += 1
        return batch

    def is_done(self, group: int) -> bool:
        """True if a group was trained on or dropped."""
        return group < self._cursor or group in self._done

    @property
    def taken(self) -> TakenGroups:
        """Position of the run in its prompts."""
        return TakenGroups(self._cursor, tuple(sorted(self._done)), in_order=False)
