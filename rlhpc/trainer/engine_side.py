"""The engines' ranks as the trainers see them: versions of the weights go there; groups, answers to held-out prompts
and reports of checkpoints come back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from rlhpc.api import RunState, Sample
from rlhpc.core.context import Reason
from rlhpc.core.errors import UserError
from rlhpc.core.folder import AttemptFolder
from rlhpc.core.heartbeat import touch
from rlhpc.parallel.transfer import gather_objects
from rlhpc.reshard.staged.source import WeightSource
from rlhpc.rollout.schedule.terms import Terms
from rlhpc.sharding.placement import Placement
from rlhpc.trainer.engine_desk import EngineDesk, Link
from rlhpc.trainer.intake import Batch
from rlhpc.trainer.rejoin import Joining

Metrics = dict[str, float]
T = TypeVar("T")
_LOOK_SECONDS = 5.0  # after which the other ranks of the trainers show a sign of life


class StoppedWaiting(Exception):
    """The ranks have agreed to stop while no engine was there. The state is that of the last step."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason)
        self.reason = reason


class EngineSide:
    """Everything between the trainers and the engines. Methods are collective over the trainers' ranks, of which only
    the first has a ``link``."""

    def __init__(
        self,
        source: WeightSource,
        terms: Terms,
        link: Link | None,
        replay: Path | None = None,
        placement: Placement | None = None,
        slow_engine_seconds: float | None = None,
    ) -> None:
        """``replay``: folder of the run whose recorded order is followed; ``placement``: needed if engines may be
        lost; ``slow_engine_seconds``: see EngineDesk."""
        self.terms, self._source, self._placement = terms, source, placement
        self._desk = None
        if link is not None:
            self._desk = EngineDesk(terms, link, replay, slow_engine_seconds=slow_engine_seconds)
        self._policy_versions: dict[int, int] = {}  # of published versions
        self._validating: list[int] = []  # versions whose answers have not been taken
        self._writing: set[int] = set()  # versions whose parts of a checkpoint are not all written
        self._steps = 0  # steps whose groups have been taken
        self.expected_lengths: Callable[[RunState], Mapping[str, Any]] = lambda state: {}
        self.agree_to_stop: Callable[[], Reason] | None = None  # collective; asked while no engine is there

    @property
    def validation_seconds(self) -> float:
        """Time that an engine has taken for a validation, at most; known on the first rank."""
        return self._desk.validation_seconds if self._desk is not None else 0.0

    def begin(self, state: RunState, checkpoint: Path | None) -> None:
        """Lets the engines begin at the present step; ``checkpoint``: the one that is resumed."""
        self._steps = state.step
        if self._desk is not None:
            self._desk.begin(state, checkpoint)

    def publish(self, state: RunState, *, checkpoint: Path | None, validates: bool, ends: bool) -> None:
        """Gives the engines the present weights. Waits until the former ones have been sent, no longer."""
        version = state.step
        self._policy_versions[version] = state.policy_version
        self._policy_versions.pop(version - self.terms.max_staleness - 2, None)
        if validates:
            self._validating.append(version)
        if checkpoint is not None:
            self._writing.add(version)
        if self._desk is not None:
            expected = self.expected_lengths(state)
            self._desk.publish(state, expected, checkpoint=checkpoint, validates=validates, ends=ends)
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
        """The groups of the next step; waits for them. The actor makes room for the models that judge them. Raises
        StoppedWaiting."""
        touch("rollout", step)
        self.check_taken(step - 1)
        self._steps = step
        self._source.offload()
        while True:
            found = self._desk.batch(_LOOK_SECONDS) if self._desk is not None else None
            sent = self._share_and_join(found.without_routed_experts() if found is not None else None)
            if sent is not None:
                return found or sent
            self.look_whether_to_stop()

    def _share_and_join(self, found: T | None) -> T | None:
        """Gives all ranks what the first one has, and lets engines join that are ready."""
        joining = self._desk.ready() if self._desk is not None else []
        sent, joining = gather_objects((found, joining))[0]
        for each in joining:
            self._join(each)
        return sent

    def look_whether_to_stop(self) -> None:
        """Between two steps the ranks agree whether to stop; a wait for rollout jobs may last longer than the job."""
        if self.agree_to_stop is None or not self.terms.elastic:
            return
        if not gather_objects(self._desk is not None and self._desk.is_alone)[0]:
            return
        if (reason := self.agree_to_stop()) != "none":
            raise StoppedWaiting(reason)

    def _join(self, joining: Joining) -> None:
        """Lets an engine that was started again generate from the newest version on."""
        assert self._placement is not None
        first = self._placement.leader_of(joining.engine)
        if self._desk is not None:
            self._desk.connect(joining, self._source.newest_number)
        self._source.join(range(first, first + self._placement.tp), joining.generation)

    def validation(self) -> tuple[int, list[Sample]] | None:
        """The oldest version whose answers to the held-out prompts have not been taken, and these in the prompts'
        order; waits for them. None if there is no such version."""
        if not self._validating:
            return None
        version = self._validating.pop(0)
        touch("validation", version)
        while True:
            found = self._desk.answers(version, _LOOK_SECONDS) if self._desk is not None else None
            sent = self._share_and_join(found)
            if sent is not None:
                return version, sent

    def share(self, version: int) -> EnginesShare | None:
        """The engines' part of the checkpoint of a version, for which the first rank waits; None if they write none."""
        return EnginesShare(self, version) if version in self._writing else None

    def written(self, version: int) -> bool:
        """True if all engines have written their parts of a checkpoint, as far as this rank knows. Not collective."""
        return self._desk is None or self._desk.written(version)

    def wait_for_writing(self) -> None:
        """Waits until the engines' parts of all checkpoints are written, which may take as long as a response."""
        while True:
            done = all(map(self.written, self._writing))
            if self._desk is not None and not done:
                self._desk.wait(_LOOK_SECONDS, "end of a save")
                done = all(map(self.written, self._writing))
            if gather_objects(done)[0]:
                return

    def finish_writing(self, version: int | None = None) -> None:
        """Waits until the engines' parts of a checkpoint are written, or all of them; raises an engine's OSError. Not
        collective."""
        for each in sorted(self._writing) if version is None else [version]:
            if each not in self._writing:
                continue
            while self._desk is not None and not self.written(each):
                self._desk.wait(_LOOK_SECONDS, "end of a save")
            self._writing.discard(each)
            errors = self._desk.errors(each) if self._desk is not None else []
            if errors and version is not None:
                raise errors[0]

    def metrics(self) -> Metrics:
        """Metrics of the engines since the last call, on the first rank."""
        return self._desk.metrics() if self._desk is not None else {}

    def traffic(self) -> Metrics:
        """Tensors that this rank sent for the version before the last published one, with ``reshard.delta``."""
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
        if self._desk is not None:
            self._desk.write_activity(attempt, step, record)

    def end(self, reason: Reason | None) -> None:
        """Lets the engines end, which wait for that after their last version."""
        if self._desk is not None:
            self._desk.end(reason)

    def close(self) -> None:
        """Disconnects, after ``end``."""
        self._source.close()
        if self._desk is not None:
            self._desk.close()


@dataclass(frozen=True)
class EnginesShare:
    """The engines' part of a checkpoint, which they write when they switch to its version."""

    side: EngineSide
    version: int

    def done(self) -> bool:
        return self.side.written(self.version)

    def finish(self) -> None:
        self.side.finish_writing(self.version)
