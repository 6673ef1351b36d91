"""Services of the trainers' first rank to engines: takes messages, notes losses, publishes versions."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlhpc.api import RunState, Sample
from rlhpc.core.attempts import trainers_since
from rlhpc.core.context import Reason
from rlhpc.core.errors import PeerLost
from rlhpc.core.folder import AttemptFolder
from rlhpc.core.heartbeat import touch
from rlhpc.core.store_client import LOST_ENGINES
from rlhpc.observe.engine_activity import EngineActivity
from rlhpc.parallel.board import Board
from rlhpc.parallel.channel import Inbox, ObjectChannel
from rlhpc.rollout.collect import Scored
from rlhpc.rollout.generator.messages import (
    Delivered,
    Held,
    Published,
    StartPoint,
    Validated,
    Written,
    published_key,
    start_key,
)
from rlhpc.rollout.generator.state import held_groups
from rlhpc.rollout.schedule.terms import Terms
from rlhpc.trainer.absences import Absences
from rlhpc.trainer.handshake import post_begin, post_end
from rlhpc.trainer.intake import Batch, Intake, make_intake
from rlhpc.trainer.laggards import Laggards
from rlhpc.trainer.rejoin import Joining, call, ready_to_join
from rlhpc.trainer.roll_call import RollCaller

Metrics = dict[str, float]
_log = logging.getLogger(__name__)
_ROLL_CALL_SECONDS = 20.0


@dataclass
class Link:
    """Connections to all engines, on the trainers' first rank. ``channels``: one to each engine that begins with the
    trainers, in their order; the others join later."""

    board: Board
    inbox: Inbox
    channels: Sequence[ObjectChannel]
    activity: EngineActivity
    attempt: AttemptFolder  # into which what engines do is recorded
    reopen: Callable[[Joining], ObjectChannel] | None = None  # connects with an engine that was started again


class EngineDesk:
    """The engines' messages, by what they are about. Nothing here is collective."""

    def __init__(
        self, terms: Terms, link: Link, replay: Path | None, *, slow_engine_seconds: float | None = None
    ) -> None:
        """``slow_engine_seconds``: for which an engine may hold up a step."""
        self._laggards = Laggards(slow_engine_seconds)
        self._stalled_since: float | None = None  # since a batch has been waited for, or the roll was called
        self.terms, self._link, self._replay = terms, link, replay
        self._intake = Intake(terms, RunState(), link.board)
        self.channels = dict(enumerate(link.channels))
        self.present = {*self.channels}
        self._num_beginning = len(link.channels)
        self._absences = Absences(range(self._num_beginning, terms.engines), trainers_since(link.attempt))
        self._roll_call = RollCaller(link.board)
        self._expected: dict[int, set[int]] = {}  # by version: engines that validate and save it
        self._validated: dict[int, dict[int, Sequence[Scored]]] = {}
        self.validation_seconds = 0.0  # that an engine has taken for one, at most
        self._written: dict[int, dict[int, OSError | None]] = {}
        self._reached = [-1] * terms.engines  # version that each engine is known to have
        self._forgotten = -1  # version up to which the board has none
        self._version = -1  # the newest published one
        self._unanswered: Published | None = None  # likewise, until its answers are taken
        self._begun = False
        self._ever_absent = self._num_beginning < terms.engines  # whether some engine ever was
        self._lost = 0  # since the last step
        self._generations: dict[int, int] = {}  # of engines that were started again
        self._given_up: dict[int, tuple[int, str]] = {}  # by engine, its newest generation that is lost, and why
        self._cursor = 0  # RunState.prompt_cursor of the newest version
        self._statistics: dict[str, list[float]] = {}  # engine/NAME_REDUCTION, since the last step

    def begin(self, state: RunState, checkpoint: Path | None) -> None:
        """Lets the engines begin at the present step; ``checkpoint``: the one that is resumed."""
        self._forgotten = state.step - 1
        board = self._link.board
        resumed = held_groups(checkpoint, self.terms.engines, self._num_beginning) if checkpoint is not None else []
        self._intake = make_intake(self.terms, state, board, self._link.attempt, resumed, self._replay)
        start = StartPoint(state.step, state.prompt_cursor, str(checkpoint) if checkpoint is not None else "")
        board.post(start_key(), start.to_json())
        post_begin(board, generates=True)
        self._begun = True

    def publish(
        self,
        state: RunState,
        expected: Mapping[str, Any] | None = None,
        *,
        checkpoint: Path | None,
        validates: bool,
        ends: bool,
    ) -> None:
        """Announces the version of the present step, whose weights are sent next. ``expected``: fields of
        ``Published`` about lengths of responses."""
        self.read()
        self._version, self._cursor = state.step, state.prompt_cursor
        folder = str(checkpoint) if checkpoint is not None else ""
        known = {**(expected or {}), **self._intake.publish(self._version)}
        if validates or folder:
            self._expected[self._version] = set(self.present)
        if self._ever_absent:
            known["engines"] = sorted(self.present)
        published = Published(
            self._version, state.policy_version, state.prompt_cursor, folder, validates, ends, **known
        )
        self._unanswered = published if validates else None
        self._link.board.post(published_key(self._version), published.to_json())
        if self._roll_call.pending:  # engines draw from another pot now
            self._call_roll()
        self._forget_published()

    def batch(self, seconds: float) -> Batch | None:
        """The next batch; None if it is not complete soon."""
        deadline = time.monotonic() + seconds
        while True:
            self.read()
            batch = self._intake.take()
            if batch is not None:
                self._laggards.begin_step()
                self._stalled_since = None
                return batch
            self._wait_for_groups()
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            self.wait(left, "rollout")

    def _wait_for_groups(self) -> None:
        """Counts for which engines the next batch waits; gives up those that hold it up for too long. After a loss the
        roll is called again now and then: a lost engine may have drawn a group just before its end."""
        if not self.terms.elastic:
            return
        now = time.monotonic()
        holding = self._intake.holding_up()
        # One that has not reported its present version may have any group that nobody else is known to have.
        unknown = None in holding.values()
        suspects = {one for one in self.present if self._reached[one] < self._version} if unknown else set()
        engines = {one for one in holding.values() if one is not None} & self.present
        late = self._laggards.look(engines or suspects, self.present, now)
        if late:
            _log.warning("engines %s held up the trainers for too long: they count as lost", late)
            self._lose(late, "held up the trainers for recovery.slow_engine_seconds")
        if self._ever_absent and not self._roll_call.pending:
            self._stalled_since = self._stalled_since or now
            if now - self._stalled_since > _ROLL_CALL_SECONDS:
                self._stalled_since = None
                self._call_roll()

    def answers(self, version: int, seconds: float) -> list[Sample] | None:
        """All engines' answers with a version, in the order of the prompts; None if they are not complete soon. Without
        those of engines that were lost, but nothing at all only of a former version."""
        self.read()
        if not self._is_answered(version):
            self.wait(seconds, "validation")
            self.read()
        if not self._is_answered(version):
            return None
        if version == self._version:
            self._unanswered = None
        found = [scored for part in self._validated.pop(version, {}).values() for scored in part]
        return [scored.sample for scored in sorted(found, key=lambda scored: (scored.group, scored.index))]

    def written(self, version: int) -> bool:
        """True if all engines have written their parts of a checkpoint."""
        self.read()
        return self._all_have(version, self._written)

    def wait(self, seconds: float, phase: str) -> None:
        """Waits for a message. It is no hang that no engine is there: they may wait in Slurm's queue."""
        if not self.present:
            phase = "waiting for engines"
            touch(phase)
        self._link.inbox.wait(seconds, phase)

    @property
    def is_alone(self) -> bool:
        """True if no engine is there."""
        return not self.present

    def errors(self, version: int) -> list[OSError]:
        """Errors of engines that could not write their parts of a checkpoint."""
        return [error for error in self._written.pop(version, {}).values() if error is not None]

    def metrics(self) -> Metrics:
        """Metrics of the engines since the last call."""
        found, self._statistics = {name: _reduced(name, values) for name, values in self._statistics.items()}, {}
        if self.terms.elastic:
            found |= {"rollout/engines": float(len(self.present)), "rollout/lost_engines": float(self._lost)}
            self._lost = 0
        self._absences.look(self.present, time.time())
        if absent := self._absences.take():
            found["engines/absent_seconds"] = absent
        if (waited := self._laggards.take()) is not None:
            found |= {"rollout/held_up_seconds": waited[1], "rollout/held_up_engine": float(waited[0])}
        return {**found, **self._link.activity.metrics()}

    def write_activity(self, attempt: AttemptFolder, step: int, record: Mapping[str, Any]) -> None:
        """Writes what both sides did in the newest step; ``record``: its metrics."""
        self._link.activity.write(attempt, step, record)

    def end(self, reason: Reason | None) -> None:
        """Lets the engines end, which wait for that after their last version."""
        if not self._begun:
            post_begin(self._link.board, generates=False)
        post_end(self._link.board, reason)

    def close(self) -> None:
        """Disconnects, after ``end``."""
        for channel in self.channels.values():
            channel.close()

    def read(self) -> None:
        """Takes all that has arrived, and notes which engines are lost."""
        gone = self._link.inbox.gone() if self.terms.elastic else {}  # their last messages are there
        for _, message in self._link.inbox.take():
            self._take(message)
        lost = [engine for engine, channel in self.channels.items() if channel in gone]
        if lost:
            self._lose(lost)
        held = self._roll_call.answer(self.present)
        if held is not None:
            self._intake = self._intake.lose(held, self._version)

    def ready(self) -> list[Joining]:
        """Engines that were lost, were started again, and wait for the trainers."""
        if not self.terms.elastic or not self._ever_absent:
            return []
        return ready_to_join(self._link.board, range(self.terms.engines), self._generations)

    def connect(self, joining: Joining, number: int) -> None:
        """Lets an engine that was lost, and started again, begin with the newest version, which is the ``number``-th of
        the attempt."""
        assert self._link.reopen is not None
        self._generations[joining.engine] = joining.generation
        if joining.engine in self.present:  # its end has not been seen yet
            self._lose([joining.engine])
        call(self._link.board, joining, number)
        try:
            channel = self._link.reopen(joining)
        except PeerLost:  # it is lost again
            return
        self.join(joining, channel)

    def join(self, joining: Joining, channel: ObjectChannel) -> None:
        """An engine begins with the newest version."""
        engine = joining.engine
        self._generations[engine] = joining.generation
        if engine in self.present:
            self._lose([engine])
        self._absences.look(self.present, time.time())
        self.channels[engine] = channel
        self.present.add(engine)
        self._reached[engine] = self._version - 1
        self._take_over_validation(engine)
        start = StartPoint(self._version, self._cursor)
        self._link.board.post(start_key(engine, joining.generation), start.to_json())

    def _take_over_validation(self, engine: int) -> None:
        """An engine that joins answers the held-out prompts of its version if nobody else does."""
        published, version = self._unanswered, self._version
        if published is None or self._expected[version] or self._validated.get(version):
            return
        self._expected[version] = {engine}
        self._written.setdefault(version, {})[engine] = None  # it has no part of the checkpoint
        again = replace(published, checkpoint="", engines=[engine])
        self._link.board.post(published_key(version), again.to_json())

    def _is_answered(self, version: int) -> bool:
        some = bool(self._validated.get(version)) or version < self._version
        return some and self._all_have(version, self._validated)

    def _lose(self, engines: Sequence[int], why: str = "does not respond") -> None:
        """Goes on without engines: the others say which groups they have, and what nobody has is started again."""
        if self._version < 0:
            raise PeerLost(f"engine {engines[0]} was lost before it began")
        self._ever_absent, self._lost = True, self._lost + len(engines)
        self._absences.look(self.present, time.time())
        for engine in engines:
            self._laggards.forget(engine)
            self._given_up[engine] = self._generations.get(engine, 0), why
            self.channels.pop(engine).drop()
            self.present.discard(engine)
            for expected in self._expected.values():
                expected.discard(engine)
            self._intake.lose_engine(engine)
        self._link.board.post(LOST_ENGINES, self._given_up)
        self._call_roll()

    def _call_roll(self) -> None:
        self._intake.count_drawn(self._version)
        self._roll_call.begin()

    def _all_have(self, version: int, found: Mapping[int, Mapping[int, object]]) -> bool:
        """True if something about a version is there from every engine that is expected to send it."""
        return self._expected[version] <= found.get(version, {}).keys()

    def _take(self, message: Any) -> None:
        match message:
            case Delivered(engine, groups, activity, version, acts, life):
                self._intake.acts((engine, life), acts)
                self._reached[engine] = max(self._reached[engine], version)
                for one in groups:
                    self._intake.add(one, (engine, life))
                self._link.activity.add(engine, activity.seconds, activity.idle, activity.tokens, version)
                for name, value in activity.statistics.items():
                    self._statistics.setdefault(name, []).append(value)
            case Validated(engine, version, scored, seconds):
                self.validation_seconds = max(self.validation_seconds, seconds)
                self._validated.setdefault(version, {})[engine] = scored
            case Written(engine, version, error, acts, life):
                self._intake.acts((engine, life), acts)
                self._intake.flush()
                self._written.setdefault(version, {})[engine] = error
            case Held(engine, number, groups):
                self._roll_call.take(engine, number, groups)
                self._intake.counts_drops(engine)
            case _:
                raise AssertionError(f"unknown message {type(message).__name__}")

    def _forget_published(self) -> None:
        """Removes versions from the board that all engines have."""
        least = min((self._reached[engine] for engine in self.present), default=self._version)
        while self._forgotten < least - 1:
            self._forgotten += 1
            self._link.board.drop(published_key(self._forgotten))
            self._intake.forget(self._forgotten)


def _reduced(name: str, values: Sequence[float]) -> float:
    """A statistic of all engines, whose name ends in how."""
    match name.rpartition("_")[2]:
        case "sum" | "ended":
            return sum(values)
        case "max":
            return max(values)
        case "min":
            return min(values)
        case _:
            return sum(values) / len(values)
