"""Groups of a step's batch: the next ``groups_per_step`` that the filter keeps, in prompt order."""

from __future__ import annotations

from dataclasses import dataclass, field

from rlhpc.rollout.schedule.terms import Terms


@dataclass(frozen=True)
class ClosedBatch:
    """The batch of step ``number``: ``kept`` are the groups that it trains on, ``dropped`` those that the filter
    dropped since the batch before, both ascending. All groups before ``end`` are in it or in a batch before. Fewer
    than ``groups_per_step`` are kept if the limit of dropped groups was reached."""

    number: int
    end: int
    kept: tuple[int, ...]
    dropped: tuple[int, ...]

    @property
    def groups(self) -> list[int]:
        """All of them, ascending."""
        return sorted((*self.kept, *self.dropped))


@dataclass
class Batches:
    """Forms batches from verdicts, which come in any order. ``number`` and ``first`` are those of the next batch: a run
    that resumes at version v with prompt cursor c begins with them."""

    terms: Terms
    number: int = 0
    first: int = 0
    _verdicts: dict[int, bool] = field(default_factory=dict)  # of the groups from ``first`` on
    _kept: list[int] = field(default_factory=list)  # of the next batch
    _next: int = -1  # group whose verdict is looked for

    def __post_init__(self) -> None:
        self._next = self.first

    def judge(self, group: int, keeps: bool = True) -> None:  # noqa: FBT001, FBT002
        """Adds a group's verdict; again is allowed, if it is the same. Without a filter all groups are kept."""
        if group < self._next:
            return
        assert self._verdicts.setdefault(group, keeps) == keeps, f"group {group} had another verdict"

    def is_done(self, group: int) -> bool:
        """True if a batch so far has the group."""
        return group < self.first

    def close(self) -> ClosedBatch | None:
        """The next batch, if all verdicts that it needs are there; each once, in order."""
        size, limit = self.terms.groups_per_step, self.terms.batch_limit
        while len(self._kept) < size and not (limit and self._next - self.first >= limit):
            keeps = self._verdicts.pop(self._next, None)
            if keeps is None:
                return None
            if keeps:
                self._kept.append(self._next)
            self._next += 1
        dropped = tuple(sorted({*range(self.first, self._next)} - {*self._kept}))
        batch = ClosedBatch(self.number, self._next, tuple(self._kept), dropped)
        self.number, self.first, self._kept = self.number + 1, self._next, []
        return batch
