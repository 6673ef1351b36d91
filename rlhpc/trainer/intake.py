"""Finished groups on the trainers' first rank, until a step takes them: in the run's order, or in that of arrival."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlhpc.api import RunState
from rlhpc.core.errors import UserError
from rlhpc.core.folder import AttemptFolder, RunFolder
from rlhpc.data.groups import without_routed_experts
from rlhpc.parallel.board import Board
from rlhpc.rollout.generator.draws import (
    LostGroups,
    add_drops,
    close_pot,
    correct_drops,
    count_drawn,
    forget_pot,
    post_orphans,
    post_pot,
)
from rlhpc.rollout.generator.messages import FinishedGroup
from rlhpc.rollout.generator.record import RecordWriter, read_record
from rlhpc.rollout.schedule.acts import Act
from rlhpc.rollout.schedule.arrival_batches import (
    ArrivalBatches,
    RecordedBatch,
    ReplayedBatches,
    Source,
    TakenGroups,
)
from rlhpc.rollout.schedule.batches import Batches, ClosedBatch
from rlhpc.rollout.schedule.terms import Terms


@dataclass(frozen=True)
class Batch:
    """The groups of a step, by number; the groups that the filter dropped before its last one; the number of finished
    groups that wait for later steps. ``end`` and ``arrival``: those of RunState."""

    end: int
    kept: Sequence[FinishedGroup]
    dropped: Sequence[FinishedGroup]
    queued: int
    arrival: dict[str, Any] | None = None

    def without_routed_experts(self) -> Batch:
        """As it is sent to all ranks."""
        return replace(self, kept=[replace(one, group=without_routed_experts(one.group)) for one in self.kept])


class Intake:
    """Groups that no step has taken. Batches are in the run's order, in which engines follow virtual time."""

    def __init__(self, terms: Terms, state: RunState, board: Board, writer: RecordWriter | None = None) -> None:
        """``writer``: of what engines do, if that may not follow from virtual time."""
        self._terms, self._board, self._writer = terms, board, writer
        self._groups, self._sources = dict[int, FinishedGroup](), dict[int, Source]()
        self._in_order = Batches(terms, state.step, state.prompt_cursor)
        self._engines: dict[int, int] = {}  # by group, the last one known to have started it
        self._counting: set[int] = set()  # engines that count the groups which the filter drops
        self._dropped: Counter[int] = Counter()  # such groups that were delivered, by engine

    def add(self, one: FinishedGroup, source: Source) -> None:
        """Adds a group, once: a resumed engine delivers groups again. ``source``: the engine that has delivered it."""
        if source[0] in self._counting:
            self._dropped[source[0]] += not self._keeps(one)
        if not self._batches.is_done(one.number) and one.number not in self._groups:
            self._groups[one.number], self._sources[one.number] = one, source
            self._batches.judge(one.number, self._keeps(one))

    def counts_drops(self, engine: int) -> None:
        """An engine counts on the board what the filter drops, from now on."""
        self._counting.add(engine)

    def acts(self, source: Source, acts: Sequence[Act]) -> None:
        """Takes what an engine has done."""
        self._engines |= {act.value: source[0] for act in acts if act.kind == "admit"}
        if self._writer is not None:
            self._writer.acts(*source, acts)

    def take(self) -> Batch | None:
        """The next batch; None if it is not complete."""
        closed = self._batches.close()
        if closed is None:
            return None
        if self._writer is not None:
            self._writer.batch(closed, self._sources)
        for group in closed.groups:
            del self._sources[group]
            self._engines.pop(group, None)
        kept, dropped = ([self._groups.pop(number) for number in part] for part in (closed.kept, closed.dropped))
        return Batch(closed.end, kept, dropped, len(self._groups), self._closed(closed))

    def holding_up(self) -> dict[int, int | None]:
        """Groups for which the next batch waits, with the engine that has started each; None: not known. Empty in the
        run's order, in which engines wait for each other."""
        return {}

    def publish(self, version: int) -> dict[str, Any]:
        """Fields of ``Published`` that engines need with a new version."""
        self.flush()
        return {}

    def flush(self) -> None:
        """Writes what is recorded so far."""
        if self._writer is not None:
            self._writer.flush()

    def forget(self, version: int) -> None:
        """All engines have a later version."""

    def count_drawn(self, version: int) -> None:
        """Notes what engines have drawn with the newest version, before they are asked what they have."""

    def lose_engine(self, engine: int) -> None:
        """An engine is lost."""

    def lose(self, held: Collection[int], version: int) -> Intake:
        """Lets engines start again what none of them has, with the newest version or a later one: from now on in the
        order of arrival. ``held``: groups that engines have. Returns the intake from now on."""
        assert self._writer is not None, "what engines do is recorded"
        taken = TakenGroups(self._in_order.first)
        batches = ArrivalBatches(self._terms, self._in_order.number, taken, {*held, *self._groups})
        found = ArrivalIntake(self._terms, self._board, self._writer, batches)
        found.take_over(self, version)
        return found

    @property
    def _batches(self) -> Batches | ArrivalBatches | ReplayedBatches:
        return self._in_order

    def _keeps(self, one: FinishedGroup) -> bool:
        return one.keeps or not self._terms.filtered

    def _closed(self, closed: ClosedBatch) -> dict[str, Any] | None:
        return None


class ArrivalIntake(Intake):
    """Batches are of what is finished first."""

    def __init__(
        self, terms: Terms, board: Board, writer: RecordWriter, batches: ArrivalBatches | ReplayedBatches
    ) -> None:
        super().__init__(terms, RunState(), board, writer)
        self._by_arrival, self._done = batches, list[int]()
        self._lost, self._drawn = LostGroups(board), (0, 0)
        self._pot: int | None = None  # version of the present one
        self._counting = set(range(terms.engines))

    def take_over(self, former: Intake, version: int) -> None:
        """Goes on with the finished groups of a former intake; engines draw with the newest version."""
        self._groups, self._sources = dict(former._groups), dict(former._sources)
        self._counting, self._dropped, self._engines = former._counting, former._dropped, former._engines
        for one in self._groups.values():
            self._by_arrival.judge(one.number, self._keeps(one))
        dropped = sum(not self._keeps(one) for one in self._groups.values())
        self._open(version, 0, add_drops(self._board, dropped - sum(self._dropped.values())))

    def add(self, one: FinishedGroup, source: Source) -> None:
        if not isinstance(self._by_arrival, ReplayedBatches) or self._by_arrival.is_from(one.number, source):
            super().add(one, source)

    def publish(self, version: int) -> dict[str, Any]:
        super().publish(version)
        self._open(version, *(close_pot(self._board, self._pot) if self._pot is not None else (0, 0)))
        return {"done": self._done}

    def forget(self, version: int) -> None:
        forget_pot(self._board, version)

    def count_drawn(self, version: int) -> None:
        self._drawn = count_drawn(self._board, version)

    def holding_up(self) -> dict[int, int | None]:
        if isinstance(self._by_arrival, ReplayedBatches):
            return {}
        return {group: self._engines.get(group) for group in self._by_arrival.overdue()}

    def lose_engine(self, engine: int) -> None:
        self._engines = {group: one for group, one in self._engines.items() if one != engine}
        correct_drops(self._board, engine, self._dropped.pop(engine, 0))

    def lose(self, held: Collection[int], version: int) -> Intake:
        assert isinstance(self._by_arrival, ArrivalBatches), "a replay has no losses of its own"
        lost = self._by_arrival.lose(held, self._lost.waiting(), *self._drawn)
        post_orphans(self._board, version, self._by_arrival.orphans)
        if lost:
            self._lost.post(version, lost)
        return self

    @property
    def _batches(self) -> Batches | ArrivalBatches | ReplayedBatches:
        return self._by_arrival

    def _open(self, version: int, drawn: int, dropped: int) -> None:
        self._pot = version
        post_pot(self._board, self._by_arrival.open_pot(version, drawn, dropped))

    def _closed(self, closed: ClosedBatch) -> dict[str, Any]:
        self._done = closed.groups
        return self._by_arrival.taken.to_json()


def make_intake(
    terms: Terms,
    state: RunState,
    board: Board,
    attempt: AttemptFolder,
    held: Collection[int],
    replay: Path | None,
) -> Intake:
    """The intake of an attempt. ``held``: groups that engines have, which resume from a checkpoint; ``replay``: folder
    of the run that is replayed."""
    writer = RecordWriter(attempt, state.step)
    if terms.order == "deterministic":
        if state.arrival is not None and state.arrival["done"]:
            raise UserError(
                "deterministic, but steps so far have trained on groups in the order of their arrival",
                where="asynchrony.schedule",
                remedy="set it back to arrival",
            )
        return Intake(terms, state, board, writer if terms.elastic else None)
    taken = TakenGroups.from_json(state.prompt_cursor, state.arrival)
    if replay is not None:
        recorded = read_record(RunFolder(replay)).batches
        _check_recorded(recorded, state.step, terms.steps, replay)
        return ArrivalIntake(terms, board, writer, ReplayedBatches(recorded, state.step, taken))
    return ArrivalIntake(terms, board, writer, ArrivalBatches(terms, state.step, taken, held))


def _check_recorded(recorded: Mapping[int, RecordedBatch], first: int, steps: int, run: Path) -> None:
    """Refuses to replay more steps than the run has recorded."""
    missing = next((step for step in range(first, steps) if step not in recorded), None)
    if missing is not None:
        raise UserError(
            f"{run} has no record of step {missing + 1}", where="train.steps", remedy=f"set it to {missing} or fewer"
        )
