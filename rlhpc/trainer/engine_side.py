"""The engines' ranks as the trainers see them: versions of the weights go there; groups, answers to held-out prompts
and reports of checkpoints come back."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlhpc.api import RunState, Sample
from rlhpc.core.errors import UserError
from rlhpc.core.folder import AttemptFolder
from rlhpc.core.heartbeat import touch
from rlhpc.core.stop import Reason
from rlhpc.data.groups import without_routed_experts
from rlhpc.observe.engine_activity import EngineActivity
from rlhpc.parallel.board import Board
from rlhpc.parallel.channel import Inbox, ObjectChannel
from rlhpc.parallel.transfer import gather_objects
from rlhpc.reshard.staged.source import WeightSource
from rlhpc.rollout.collect import Scored
from rlhpc.rollout.generator.messages import (
    START_KEY,
    Delivered,
    FinishedGroup,
    Published,
    StartPoint,
    Validated,
    Written,
    published_key,
)
from rlhpc.rollout.schedule.batches import Batches, ClosedBatch
from rlhpc.rollout.schedule.terms import Terms
from rlhpc.trainer.handshake import post_begin, post_end

Metrics = dict[str, float]
_LOOK_SECONDS = 5.0  # after which the other ranks of the trainers show a sign of life


@dataclass
class Link:
    """Connections to all engines, on the trainers' first rank. ``channels``: one to each engine, in their order."""

    board: Board
    inbox: Inbox
    channels: Sequence[ObjectChannel]
    activity: EngineActivity


@dataclass(frozen=True)
class Batch:
    """The groups of a step, in the run's order; the groups that the filter dropped before its last one; the number of
    finished groups that wait for later steps."""

    end: int  # place in the run's order where the next batch begins
    kept: Sequence[FinishedGroup]
    dropped: Sequence[FinishedGroup]
    queued: int

    def without_routed_experts(self) -> Batch:
        """As it is sent to all ranks."""
        return replace(self, kept=[replace(one, group=without_routed_experts(one.group)) for one in self.kept])


class EngineSide:
    """Everything between the trainers and the engines. Methods are collective over the trainers' ranks, of which only
    the first has a ``link``."""

    def __init__(self, source: WeightSource, terms: Terms, link: Link | None) -> None:
        self.terms = terms
        self._source, self._link = source, link
        self._batches = Batches(terms)
        self._groups: dict[int, FinishedGroup] = {}  # that no step has taken
        self._policy_versions: dict[int, int] = {}  # of published versions
        self._validating: list[int] = []  # versions whose answers have not been taken
        self._validated: dict[int, dict[int, Sequence[Scored]]] = {}
        self.validation_seconds = 0.0  # that an engine has taken for one, at most; known on the first rank
        self._writing: set[int] = set()  # versions whose parts of a checkpoint are not all written
        self._written: dict[int, dict[int, OSError | None]] = {}
        self._reached = [-1] * terms.engines  # version that each engine is known to have
        self._dropped = -1  # version up to which the board has none
        self._steps = 0  # steps whose groups have been taken
        self._begun = False
        self._statistics: dict[str, list[float]] = {}  # engine/NAME_REDUCTION, since the last step

    def begin(self, state: RunState, checkpoint: Path | None) -> None:
        """Lets the engines begin at the present step; ``checkpoint``: the one that is resumed."""
        self._batches = Batches(self.terms, state.step, state.prompt_cursor)
        self._dropped, self._steps = state.step - 1, state.step
        if self._link is not None:
            start = StartPoint(state.step, state.prompt_cursor, str(checkpoint) if checkpoint is not None else "")
            self._link.board.post(START_KEY, start.to_json())
            post_begin(self._link.board, generates=True)
        self._begun = True

    def publish(self, state: RunState, *, checkpoint: Path | None, validates: bool, ends: bool) -> None:
        """Gives the engines the present weights. Waits until the former ones have been sent, no longer."""
        version = state.step
        self._policy_versions[version] = state.policy_version
        self._policy_versions.pop(version - self.terms.max_staleness - 2, None)
        if validates:
            self._validating.append(version)
        if checkpoint is not None:
            self._writing.add(version)
        if self._link is not None:
            folder = str(checkpoint) if checkpoint is not None else ""
            published = Published(version, state.policy_version, state.prompt_cursor, folder, validates, ends)
            self._link.board.post(published_key(version), published.to_json())
            self._forget_published()
        self._source.publish(version)

    def check_taken(self, steps: int) -> None:
        """Refuses a step of the user's own that does not take its groups once: the engines' schedule counts on it."""
        if self._steps != steps:
            often = "twice" if self._steps > steps else "not at all"
            raise UserError(
                f"step {max(steps, self._steps)} has generated {often}, but engines on ranks of their own generate for "
                "every step",
                where="train.step",
                remedy="call generate once in each step, or set placement to colocated",
            )

    def oldest_policy_version(self, step: int, policy_version: int) -> int:
        """Policy version of the oldest weights that tokens of RL step ``step`` (from 0) may be sampled with."""
        oldest = step - self.terms.max_staleness
        return self._policy_versions.get(oldest, policy_version - self.terms.max_staleness)

    def batch(self, step: int) -> Batch:
        """The groups of the next step; waits for them. The actor makes room for the models that judge them."""
        touch("rollout", step)
        self.check_taken(step - 1)
        self._steps = step
        self._source.offload()
        while True:
            found = self._wait_for_batch() if self._link is not None else None
            sent = gather_objects(found.without_routed_experts() if found is not None else None)[0]
            if sent is not None:
                return found or sent

    def validation(self) -> tuple[int, list[Sample]] | None:
        """The oldest version whose answers to the held-out prompts have not been taken, and these in the prompts'
        order; waits for them. None if there is no such version."""
        if not self._validating:
            return None
        version = self._validating.pop(0)
        touch("validation", version)
        while True:
            found = self._answers(version) if self._link is not None else None
            sent = gather_objects(found)[0]
            if sent is not None:
                return version, sent

    def share(self, version: int) -> EnginesShare | None:
        """The engines' part of the checkpoint of a version, for which the first rank waits; None if they write none."""
        return EnginesShare(self, version) if version in self._writing else None

    def written(self, version: int) -> bool:
        """Whether all engines have written their parts of a checkpoint, as far as this rank knows. Not collective."""
        self._read()
        return self._link is None or len(self._written.get(version, {})) == self.terms.engines

    def wait_for_writing(self) -> None:
        """Waits until the engines' parts of all checkpoints are written, which may take as long as a response."""
        while True:
            done = all(map(self.written, self._writing))
            if self._link is not None and not done:
                self._link.inbox.wait(_LOOK_SECONDS, "end of a save")
                done = all(map(self.written, self._writing))
            if gather_objects(done)[0]:
                return

    def finish_writing(self, version: int | None = None) -> None:
        """Waits until the engines' parts of a checkpoint are written, or all of them; raises an engine's OSError. Not
        collective."""
        for each in sorted(self._writing) if version is None else [version]:
            if each not in self._writing:
                continue
            while self._link is not None and not self.written(each):
                self._link.inbox.wait(_LOOK_SECONDS, "end of a save")
            self._writing.discard(each)
            errors = [error for error in self._written.pop(each, {}).values() if error is not None]
            if errors and version is not None:
                raise errors[0]

    def metrics(self) -> Metrics:
        """What the engines did since the last call, on the first rank."""
        if self._link is None:
            return {}
        found, self._statistics = {name: _reduced(name, values) for name, values in self._statistics.items()}, {}
        return {**found, **self._link.activity.metrics()}

    def traffic(self) -> Metrics:
        """What this rank has sent for the version before the last published one, with ``reshard.delta``."""
        found = self._source.take_counts()
        if found is None:
            return {}
        return {
            "weight_sync/sent_bytes_sum": float(found.sent),
            "weight_sync/weights_bytes_sum": float(found.weights),
            "weight_sync/changed_elements_sum": float(found.changed),
            "weight_sync/repaired_messages_sum": float(found.repaired),
        }

    def write_activity(self, attempt: AttemptFolder, step: int, record: Mapping[str, Any]) -> None:
        """Writes what both sides did in the newest step, on the first rank; ``record``: its metrics."""
        if self._link is not None:
            self._link.activity.write(attempt, step, record)

    def end(self, reason: Reason | None) -> None:
        """Lets the engines end, which wait for that after their last version."""
        if self._link is not None:
            if not self._begun:
                post_begin(self._link.board, generates=False)
            post_end(self._link.board, reason)

    def close(self) -> None:
        """Disconnects, after ``end``."""
        self._source.close()
        for channel in self._link.channels if self._link is not None else ():
            channel.close()

    def _wait_for_batch(self) -> Batch | None:
        """The next batch; None if it is not complete soon."""
        assert self._link is not None
        deadline = time.monotonic() + _LOOK_SECONDS
        while True:
            self._read()
            closed = self._batches.close()
            if closed is not None:
                return self._taken(closed)
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            self._link.inbox.wait(left, "rollout")

    def _taken(self, closed: ClosedBatch) -> Batch:
        kept = [self._groups.pop(number) for number in closed.kept]
        dropped = [self._groups.pop(number) for number in closed.dropped]
        return Batch(closed.end, kept, dropped, len(self._groups))

    def _answers(self, version: int) -> list[Sample] | None:
        """All engines' answers with a version; None if they are not complete soon."""
        assert self._link is not None
        self._read()
        if len(self._validated.get(version, {})) < self.terms.engines:
            self._link.inbox.wait(_LOOK_SECONDS, "validation")
            self._read()
        parts = self._validated.get(version, {})
        if len(parts) < self.terms.engines:
            return None
        found = [scored for part in self._validated.pop(version).values() for scored in part]
        return [scored.sample for scored in sorted(found, key=lambda scored: (scored.group, scored.index))]

    def _read(self) -> None:
        """Takes all that has arrived."""
        for _, message in self._link.inbox.take() if self._link is not None else ():
            self._take(message)

    def _take(self, message: Any) -> None:
        match message:
            case Delivered(engine, groups, activity, version):
                self._reached[engine] = max(self._reached[engine], version)
                for one in groups:
                    self._add(one)
                assert self._link is not None
                self._link.activity.add(engine, activity.seconds, activity.idle, activity.tokens, version)
                for name, value in activity.statistics.items():
                    self._statistics.setdefault(name, []).append(value)
            case Validated(engine, version, scored, seconds):
                self.validation_seconds = max(self.validation_seconds, seconds)
                self._validated.setdefault(version, {})[engine] = scored
            case Written(engine, version, error):
                self._written.setdefault(version, {})[engine] = error
            case _:
                raise AssertionError(f"unknown message {type(message).__name__}")

    def _add(self, one: FinishedGroup) -> None:
        """Adds a group, once: a resumed engine delivers groups again."""
        if one.number >= self._batches.first:
            self._groups[one.number] = one
            self._batches.judge(one.number, one.keeps or not self.terms.filtered)

    def _forget_published(self) -> None:
        """Removes versions from the board that all engines have."""
        assert self._link is not None
        while self._dropped < min(self._reached) - 1:
            self._dropped += 1
            self._link.board.drop(published_key(self._dropped))


@dataclass(frozen=True)
class EnginesShare:
    """The engines' part of a checkpoint, which they write when they switch to its version."""

    side: EngineSide
    version: int

    def done(self) -> bool:
        return self.side.written(self.version)

    def finish(self) -> None:
        self.side.finish_writing(self.version)


def _reduced(name: str, values: Sequence[float]) -> float:
    """A statistic of all engines, whose name ends in how."""
    match name.rpartition("_")[2]:
        case "sum":
            return sum(values)
        case "max":
            return max(values)
        case "min":
            return min(values)
        case _:
            return sum(values) / len(values)
