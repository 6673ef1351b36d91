"""What becomes of the groups of one step: asked for, taken into its batch, kept for the next step, or dropped.

A group is known by its number, the place of its prompt in the run's order of prompts. Every rank makes the same plan.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from math import ceil

from rlhpc.config.rollout import DynamicSamplingSection
from rlhpc.core.errors import UserError

Number = int


@dataclass(frozen=True)
class Bounds:
    """Of a step: ``groups`` in its batch, of which ``least`` can be learnt from; prompts asked for each one that is
    missing; batches of prompts at most."""

    groups: int
    least: int = 1
    oversample: float = 1.0
    max_batches: int = 1


@dataclass(frozen=True)
class Outcome:
    """Where every group went; none is in two places."""

    taken: tuple[Number, ...]  # the step's batch, oldest first
    kept: tuple[Number, ...]  # finished and good, for the next step
    unfinished: tuple[Number, ...]  # to be taken up again in the next step
    dropped: tuple[Number, ...]  # scored and not good
    batches: int
    short: int  # groups that the batch lacks


@dataclass
class StepPlan:
    """One step's decisions, made one after the other as groups are scored.

    ``good`` are finished groups kept from before, ``unfinished`` those to be taken up again; ``cursor`` is the number
    of the next prompt that nobody has asked for.
    """

    bounds: Bounds
    cursor: Number
    good: set[Number] = field(default_factory=set)
    unfinished: set[Number] = field(default_factory=set)
    dropped: set[Number] = field(default_factory=set)
    batches: int = 0
    _judged: int = 0
    _found: int = 0

    @property
    def missing(self) -> int:
        """Good groups that the batch still lacks."""
        return max(0, self.bounds.groups - len(self.good))

    def next_batch(self) -> list[Number] | None:
        """The groups to put under way now, those taken up again first; None when the batch is full or the bound is
        reached. May ask for no new prompt where enough are unfinished."""
        if not self.missing or self.batches >= self.bounds.max_batches:
            return None
        again = sorted(self.unfinished)
        new = list(range(self.cursor, self.cursor + max(0, self._wanted() - len(again))))
        self.cursor += len(new)
        self.unfinished.update(new)
        self.batches += 1
        return again + new

    def settle(self, good: Iterable[Number], bad: Iterable[Number]) -> None:
        """Groups under way that have come to their end."""
        good, bad = set(good), set(bad)
        assert good | bad <= self.unfinished, f"{sorted((good | bad) - self.unfinished)} were not under way"
        assert not good & bad
        self.unfinished -= good | bad
        self.good |= good
        self.dropped |= bad
        self._judged += len(good) + len(bad)
        self._found += len(good)

    def finish(self) -> Outcome:
        """The oldest good groups are the batch; too few of them to learn from are kept instead."""
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
        """Groups under way that should fill the batch, by the share of good ones among those scored in this step; a
        whole batch at most."""
        most = ceil(self.bounds.groups * self.bounds.oversample)
        if self._judged and not self._found:
            return most
        share = self._found / self._judged if self._judged else 1.0
        return min(most, ceil(self.missing * self.bounds.oversample / share))


def check_shortage(section: DynamicSamplingSection, outcome: Outcome, groups: int) -> None:
    """A UserError where a step's batch has to be full and is not."""
    if outcome.short and section.shortage == "error":
        raise UserError(
            f"{outcome.short} of a step's {groups} groups are missing after {outcome.batches} batches of prompts",
            where="train.dynamic_sampling.max_batches",
            remedy="raise it, take prompts that are neither too easy nor too hard, or set shortage to warn",
        )


def split_stale(
    versions: Mapping[Number, int], version: int, max_staleness: int
) -> tuple[Collection[Number], Collection[Number]]:
    """(fresh, stale) groups by the oldest weights that drew a token of each, ``version`` being today's."""
    stale = {number for number, drawn in versions.items() if version - drawn > max_staleness}
    return set(versions) - stale, stale


def replayed_groups(groups: int, fraction: float, available: int) -> int:
    """How many of a step's groups come from the replay buffer; one at least is new."""
    return min(round(groups * fraction), available, groups - 1)
