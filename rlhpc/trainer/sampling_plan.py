"""Plan of one step's groups: which are requested, taken into the batch, kept for the next step, or dropped.

A group is identified by its number, the place of its prompt in the run's order. Every rank makes the same plan.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from math import ceil, inf

from rlhpc.config.rollout import DynamicSamplingSection
from rlhpc.core.errors import UserError

Number = int


@dataclass(frozen=True)
class Bounds:
    """``groups`` in a step's batch, ``least`` to train at all, prompts requested per missing group (``oversample``),
    the maximum number of prompt batches, and the maximum staleness of a group, with the ``later`` groups that each of
    the next steps takes at least."""

    groups: int
    least: int = 1
    oversample: float = 1.0
    max_batches: int = 1
    max_staleness: int = 4
    later: int | None = None  # default: groups

    @property
    def started(self) -> float:
        """Maximum number of groups that are started and not trained on: as many as steps that take the oldest first
        train on before any exceeds the maximum staleness. Without oversampling no step leaves long groups behind."""
        if self.oversample == 1:
            return inf
        return self.groups + self.max_staleness * (self.later or self.groups)


@dataclass(frozen=True)
class Outcome:
    """Every group of the step, in exactly one of the four lists."""

    taken: tuple[Number, ...]  # the step's batch, oldest first
    kept: tuple[Number, ...]  # finished and good, for the next step
    unfinished: tuple[Number, ...]  # to be resumed in the next step
    dropped: tuple[Number, ...]  # scored and not good
    batches: int
    short: int  # groups missing in the batch


@dataclass
class StepPlan:
    """One step's decisions, made as groups are scored.

    ``good`` are finished groups of former steps, ``unfinished`` those to resume, ``staleness`` that of both; ``cursor``
    is the number of the next new prompt.
    """

    bounds: Bounds
    cursor: Number
    good: set[Number] = field(default_factory=set)
    unfinished: set[Number] = field(default_factory=set)
    staleness: Mapping[Number, int] = field(default_factory=dict)
    dropped: set[Number] = field(default_factory=set)
    batches: int = 0
    _scored: int = 0
    _found: int = 0

    @property
    def missing(self) -> int:
        """Number of good groups missing in the batch."""
        return max(0, self.bounds.groups - len(self.good))

    @property
    def waits(self) -> bool:
        """True if the step must go on because a group would exceed the maximum staleness before its turn in later
        steps that take the oldest first. So groups that take long are trained on late, and never dropped."""
        if not self.unfinished:
            return False
        left = sorted({*sorted(self.good)[self.bounds.groups :], *self.unfinished})
        steps = (1 + place // (self.bounds.later or self.bounds.groups) for place in range(len(left)))
        most = self.bounds.max_staleness
        return any(self.staleness.get(number, 0) + step > most for number, step in zip(left, steps, strict=True))

    def next_batch(self) -> list[Number] | None:
        """The groups to generate next, resumed ones first; None if the batch is full or the maximum of batches is
        reached. Requests no new prompts if enough groups are unfinished."""
        if not (self.missing or self.waits) or self.batches >= self.bounds.max_batches:
            return None
        again = sorted(self.unfinished)
        room = self.bounds.started - len(self.good) - len(again)
        new = list(range(self.cursor, self.cursor + int(max(0, min(self._wanted() - len(again), room)))))
        self.cursor += len(new)
        self.unfinished.update(new)
        self.batches += 1
        return again + new

    def settle(self, good: Iterable[Number], bad: Iterable[Number]) -> None:
        """Records groups that have ended."""
        good, bad = set(good), set(bad)
        assert good | bad <= self.unfinished, f"{sorted((good | bad) - self.unfinished)} were not requested"
        assert not good & bad
        self.unfinished -= good | bad
        self.good |= good
        self.dropped |= bad
        self._scored += len(good) + len(bad)
        self._found += len(good)

    def finish(self) -> Outcome:
        """The oldest good groups are the batch; if they are too few to train on, they are kept instead."""
        ordered = sorted(self.good)
        taken = ordered[: self.bounds.groups]
        short = self.bounds.groups - len(taken)
        if len(taken) < self.bounds.least:
            taken = []
        kept = ordered[len(taken) :]
        return Outcome(
            tuple(taken),
            tuple(kept),
            tuple(sorted(self.unfinished)),
            tuple(sorted(self.dropped)),
            self.batches,
            short,
        )

    def _wanted(self) -> int:
        """Groups expected to fill the batch, from the fraction of good groups among those scored in this step; at most
        a whole batch."""
        if not self.missing:
            return 0
        most = ceil(self.bounds.groups * self.bounds.oversample)
        if self._scored and not self._found:
            return most
        share = self._found / self._scored if self._scored else 1.0
        return min(most, ceil(self.missing * self.bounds.oversample / share))


def check_shortage(section: DynamicSamplingSection, outcome: Outcome, groups: int) -> None:
    """Raises UserError if the batch is not full and train.dynamic_sampling.shortage is error."""
    if outcome.short and section.shortage == "error":
        raise UserError(
            f"{outcome.short} of a step's {groups} groups are missing after {outcome.batches} batches of prompts",
            where="train.dynamic_sampling.max_batches",
            remedy="raise it, choose prompts that are neither too easy nor too hard, or set shortage to warn",
        )


def split_stale(
    versions: Mapping[Number, int], version: int, max_staleness: int
) -> tuple[Collection[Number], Collection[Number]]:
    """(fresh, stale) groups by the oldest policy version of their tokens; ``version`` is the present one."""
    stale = {number for number, oldest in versions.items() if version - oldest > max_staleness}
    return set(versions) - stale, stale
