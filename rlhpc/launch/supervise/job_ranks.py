"""Ranks of a job. With recovery.lost_engines rejoin each engine may be lost, and come back while the others go on.

Otherwise all ranks are one part.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from rlhpc.config.schema import RunConfig
from rlhpc.core import exits
from rlhpc.core.exits import ExitRecord
from rlhpc.core.folder import AttemptFolder
from rlhpc.core.store_client import BEGIN, BOARD, LOST_ENGINES, TRAINERS, TrainersStart
from rlhpc.launch.roles import parts_of
from rlhpc.launch.supervise import engine_losses
from rlhpc.launch.supervise.diagnosis import Diagnosis, diagnose_error
from rlhpc.launch.supervise.job_store import StoreServer

ENGINE_LOST = "EngineLost"  # type of the records of engines when none is left
_GRACE_SECONDS = 1.0  # for trainers to fail too, for which an engine's end may be the first sign
_END_SECONDS = 10.0  # for engines to end after the trainers
_ENDING_THREADS = 16
_LOOK_SECONDS = 0.5


class JobPart(Protocol):
    """Consecutive ranks that are started and ended together. ``node``: that of the first."""

    ranks: range
    node: str

    def poll(self) -> dict[int, ExitRecord]:
        """Exit records of the ranks that ended; a rank that left none gets one of kind ``signal``."""

    def end(self) -> None:
        """Kills every rank with its children; may take a while."""

    def unrecorded(self) -> dict[int, ExitRecord]:
        """Records of what the launcher knows of ranks that may have left none: their death, or that they run or were
        ended by it."""

    @property
    def gone(self) -> str:
        """Reason why the ranks cannot be started again in their place; empty if they can."""

    @property
    def output(self) -> str:
        """Output of their starter on their end; empty without one."""

    @property
    def exit_code(self) -> int:
        """Exit code of their starter."""


class PartStart(Protocol):
    """Start of the ranks of an attempt."""

    @property
    def config(self) -> RunConfig: ...

    @property
    def world_size(self) -> int: ...

    @property
    def attempt(self) -> AttemptFolder: ...

    def start(self, ranks: range, generation: int = 0) -> JobPart:
        """Starts a part, or all. ``generation``: number of its starts before."""


@dataclass
class _Engine:
    """Ranks of an engine. ``lost_since``: time at which they were first seen to have failed; ``ending``: thread that
    ends the rest of them, because a node that does not answer takes its time."""

    part: JobPart
    state: engine_losses.EngineLife
    lost_since: float | None = None
    ending: threading.Thread | None = None

    @property
    def is_due(self) -> bool:
        """True if it is to be started again now."""
        is_ending = self.ending is not None and self.ending.is_alive()
        return self.state.phase == "waiting" and time.time() >= self.state.due and not is_ending


@dataclass
class JobRanks:
    """All ranks of an attempt. ``groups``: parts whose failure ends it, unless they are started again; ``engines``:
    parts that may be lost; ``store``: of the trainers' job; ``starts``: of its groups before the present one."""

    how: PartStart
    groups: list[JobPart]
    engines: list[_Engine] = field(default_factory=list)
    board: TrainersBoard | None = None
    report_loss: Callable[[str], object] = str
    store: StoreServer | None = None
    starts: int = 0
    losses: int = 0
    first_engine: int = 0  # number of the first of the engines
    record: Path = Path()  # of what becomes of them
    _done_since: float | None = None

    @classmethod
    def start(cls, how: PartStart, store: StoreServer, report_loss: Callable[[str], object]) -> JobRanks:
        """Starts all ranks. ``report_loss``: takes a line on each loss of an engine."""
        first, *engines = parts_of(how.config, how.world_size)
        found = cls(
            how,
            [how.start(first)],
            [_Engine(how.start(part), engine_losses.EngineLife(since=time.time())) for part in engines],
        )
        if how.config.may_lose_engines:
            found.board, found.store = TrainersBoard(store.read), store
        if engines:
            found.report_loss, found.record = report_loss, how.attempt.engine_losses
            found._write()
        return found

    @classmethod
    def start_engines(
        cls,
        how: PartStart,
        parts: Mapping[int, range],
        record: Path,
        board: TrainersBoard,
        report_loss: Callable[[str], object],
    ) -> JobRanks:
        """Starts engines alone, whose trainers are another job's. ``parts``: by their consecutive numbers; with a
        ``record`` they were started before."""
        _, former = engine_losses.read_engine_lives(record) or (
            0,
            engine_losses.EnginesRecord(tuple(engine_losses.EngineLife() for _ in parts)),
        )
        for part, life in zip(parts.values(), former.engines, strict=True):
            exits.put_aside(how.attempt.exits, part, how.attempt.former_exits(life.generation))
        engines = [
            _Engine(how.start(part, life.generation), life)
            for part, life in zip(parts.values(), map(engine_losses.begun_again, former.engines), strict=True)
        ]
        found = cls(how, [], engines, board, report_loss, losses=former.losses, first_engine=min(parts), record=record)
        found._write()
        return found

    @property
    def ranks(self) -> list[int]:
        """All ranks, those of lost engines too."""
        return [rank for part in self.parts for rank in part.ranks]

    def poll(self) -> dict[int, ExitRecord]:
        """Exit records of ranks that have ended, without those of lost engines whose loss ends nothing."""
        ended = {rank: record for group in self.groups for rank, record in group.poll().items()}
        if not self.engines:
            return ended
        failed = any(record.kind not in ("done", "stopped") for record in ended.values())
        if self.groups and len(ended) == sum(len(group.ranks) for group in self.groups) and self._done_since is None:
            self._done_since = time.monotonic()
        reported = self.board.lost_engines() if self.board is not None else {}
        for number, engine in enumerate(self.engines, self.first_engine):
            own = self._poll_engine(number, engine, reported.get(number), failing=failed)
            ended |= own
        return ended

    def may_start_groups_again(self) -> bool:
        """True if the trainers can be started again while the engines wait for them."""
        if self.store is None or any(group.gone for group in self.groups):
            return False
        waiting = all(engine.state.phase == "running" and not engine.part.poll() for engine in self.engines)
        return waiting and self._has_begun()

    def end_groups(self) -> None:
        """Kills the rest of the trainers' ranks."""
        for group in self.groups:
            group.end()

    def start_groups_again(self) -> None:
        """Starts trainers that have ended once more. Engines read it from the store, and begin again with them."""
        assert self.store is not None, "trainers are started again in their own job"
        for group in self.groups:
            exits.put_aside(self.how.attempt.exits, group.ranks, self.how.attempt.former_exits(self.starts))
        self.starts, self._done_since = self.starts + 1, None
        present = {number: engine.state.generation for number, engine in enumerate(self.engines, self.first_engine)}
        self.store.write(TRAINERS, TrainersStart(self.starts, present).to_json())
        self.groups = [self.how.start(group.ranks, self.starts) for group in self.groups]

    def end(self) -> None:
        """Kills every rank with its children."""
        with ThreadPoolExecutor(_ENDING_THREADS) as pool:
            list(pool.map(lambda part: part.end(), self.parts))
        for engine in self.engines:
            if engine.ending is not None:
                engine.ending.join()

    @property
    def parts(self) -> list[JobPart]:
        """All parts, in the order of their ranks."""
        return [*self.groups, *(engine.part for engine in self.engines)]

    @property
    def running_parts(self) -> list[JobPart]:
        """Parts without those of lost engines."""
        return [*self.groups, *(engine.part for engine in self.engines if engine.state.phase == "running")]

    def _poll_engine(
        self, number: int, engine: _Engine, reported: tuple[int, str] | None, *, failing: bool
    ) -> dict[int, ExitRecord]:
        """Exit records of an engine's ranks, if its end is the run's or ends it."""
        state = engine.state
        if state.phase != "running":
            if self._done_since is not None or not engine_losses.may_go_on([each.state for each in self.engines]):
                return self._records(engine, "done" if self._done_since is not None else "error")
            if engine.is_due and not failing:
                self._start_again(engine)
            return {}
        own = engine.part.poll()
        bad = [record for record in own.values() if record.kind not in ("done", "stopped")]
        if failing or self._done_since is not None:
            late = self._done_since is not None and time.monotonic() - self._done_since > _END_SECONDS
            if (late and not failing) or (bad and not failing):  # it was to join, or the trainers did not wait for it
                engine.part.end()
                return self._records(engine, "done")
            return own
        given_up = reported if reported is not None and reported[0] == state.generation else None
        if not bad and given_up is None:
            return own
        engine.lost_since = engine.lost_since or time.monotonic()
        if bad and time.monotonic() - engine.lost_since < _GRACE_SECONDS:
            return {}
        if bad and self.groups and not self._has_begun():  # the trainers would wait for it
            return own
        return self._lose(number, engine, exits.first_failure(bad), given_up[1] if given_up is not None else "")

    def _lose(self, number: int, engine: _Engine, failed: ExitRecord | None, why: str) -> dict[int, ExitRecord]:
        """Decides on an engine that was lost, and ends the rest of it; returns its record if the attempt must end.
        ``why``: the trainers' reason."""
        part, generation = engine.part, engine.state.generation
        silent = ExitRecord(part.ranks.start, part.node, 0, time.time(), "error", "PeerLost", why)
        record = failed or silent
        diagnosis = Diagnosis("bad_node", part.gone) if part.gone else diagnose_error(record)
        state = engine_losses.after_loss(
            engine.state, diagnosis, self.how.config.recovery, time.time(), comes_back=not part.gone
        )
        if state is None:
            return {record.rank: record}
        engine.state, engine.lost_since, self.losses = state, None, self.losses + 1
        engine.ending = threading.Thread(target=self._clear, args=(part, generation), name=f"end-engine-{number}")
        engine.ending.start()
        self._write()
        what = "is started again" if state.phase == "waiting" else "is not started again"
        goes_on = (
            "training goes on"
            if engine_losses.may_go_on([each.state for each in self.engines])
            else "no engine is left"
        )
        why = part.gone or record.message or record.type
        self.report_loss(f"engine {number} on {part.node} was lost ({why}), and {what}; {goes_on}")
        return {}

    def _has_begun(self) -> bool:
        """True if the trainers are connected with all engines that begin with them."""
        return self.board is not None and self.board.has_begun()

    def _clear(self, part: JobPart, generation: int) -> None:
        """Ends the ranks of a lost engine and puts their records aside."""
        part.end()
        exits.put_aside(self.how.attempt.exits, part.ranks, self.how.attempt.former_exits(generation))

    def _start_again(self, engine: _Engine) -> None:
        engine.state = engine_losses.started_again(engine.state, time.time())
        engine.part = self.how.start(engine.part.ranks, engine.state.generation)
        self._write()

    def _records(self, engine: _Engine, kind: Any) -> dict[int, ExitRecord]:
        """Records for the ranks of an engine that has ended."""
        type_, message = (ENGINE_LOST, engine.state.why) if kind != "done" else ("", "")
        part, now = engine.part, time.time()
        return {rank: ExitRecord(rank, part.node, 0, now, kind, type_, message) for rank in part.ranks}

    def _write(self) -> None:
        states = tuple(engine.state for engine in self.engines)
        engine_losses.EnginesRecord(states, self.losses).write(self.record, self.first_engine)


class TrainersBoard:
    """Board in the job's store on which the trainers' first rank posts, as a launcher reads it."""

    def __init__(self, read: Callable[[str], bytes | None]) -> None:
        """``read``: gives a value of the store by its key, None if it is not there."""
        self._read, self._lost, self._looked = read, dict[int, tuple[int, str]](), float("-inf")

    def lost_engines(self) -> dict[int, tuple[int, str]]:
        """Number of starts of each given-up engine before it was given up last in the attempt, and the reason."""
        if time.monotonic() > self._looked + _LOOK_SECONDS:
            self._looked = time.monotonic()
            with suppress(ValueError, TypeError, AttributeError, LookupError):
                start = self._start()
                found = json.loads(self._read(start.key(f"{BOARD}/{LOST_ENGINES}")) or b"{}")
                lost = {int(engine): (int(given_up[0]), str(given_up[1])) for engine, given_up in found.items()}
                self._lost = {one: (start.engines.get(one, 0) + n, why) for one, (n, why) in lost.items()}
        return self._lost

    def has_begun(self) -> bool:
        """True if RL has begun, so that the trainers are connected with all engines that begin with them."""
        return self._read(self._start().key(f"{BOARD}/{BEGIN}")) is not None

    def _start(self) -> TrainersStart:
        return TrainersStart.from_json(self._read(TRAINERS))
