"""Groups that engines may start with a version, with `schedule: arrival`: a pot that all of them draw from.

A pot opens when the trainers publish its version, and closes when they publish the next one. Its places are numbered;
an engine draws the next one by a counter that all share. Places beyond the pot's count are reserved by who drew them:
the count grows by one with each group that the filter drops.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Pot:
    """Groups that may start with ``version``: first ``again``, which no engine has any more or has ever had, then those
    from ``first`` on; ``count`` in all, and one more for each that was dropped after the first ``dropped`` ones.
    ``former_places``: so many places of the pot before are used."""

    version: int
    first: int
    count: int
    again: tuple[int, ...] = ()
    dropped: int = 0
    former_places: int = 0

    def group(self, place: int) -> int:
        """The group at a place."""
        return self.again[place] if place < len(self.again) else self.first + place - len(self.again)

    def limit(self, dropped: int, orphans: Iterable[int] = ()) -> int:
        """Number of places that may be used, once so many groups of the attempt are ``dropped``. ``orphans``: places
        that lost engines had drawn, and nobody uses."""
        limit = self.count + dropped - self.dropped
        for place in sorted(orphans):
            limit += place < limit
        return limit

    def groups(self, drawn: int) -> Sequence[int]:
        """The groups of the first ``drawn`` places."""
        return [self.group(place) for place in range(drawn)]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Pot:
        return cls(**{**record, "again": tuple(record["again"])})
