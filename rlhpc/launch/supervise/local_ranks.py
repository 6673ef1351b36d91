"""The ranks of a run on this machine, started through submitit; with recovery.lost_engines rejoin each engine apart."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from submitit import LocalExecutor

from rlhpc.config.schema import RunConfig
from rlhpc.core import env, exits
from rlhpc.core.exits import ExitRecord
from rlhpc.core.folder import AttemptFolder
from rlhpc.core.process import ProcessId
from rlhpc.core.rank import node_name
from rlhpc.core.shown import show
from rlhpc.launch.machine import environment, rank_environment
from rlhpc.launch.roles import roles_of
from rlhpc.launch.supervise.diagnosis import diagnose_error
from rlhpc.launch.supervise.engine_losses import EngineLife, EnginesRecord, after_loss, may_go_on, started_again
from rlhpc.launch.supervise.lost_by_trainers import LostByTrainers
from rlhpc.launch.supervise.process_watch import Ranks
from rlhpc.launch.supervise.rendezvous_server import StoreServer
from rlhpc.launch.worker.main import run_local_rank
from rlhpc.launch.worker.nsys import nsys_environment

_FOR_EVER_MINUTES = 60 * 24 * 365
_GRACE_SECONDS = 1.0  # for trainers to fail too, for which an engine's end may be the first sign
_END_SECONDS = 10.0  # for engines to end after the trainers


@dataclass(frozen=True)
class RankStart:
    """How ranks are started. ``settings``: further variables of their environment."""

    config: RunConfig
    attempt: AttemptFolder
    entry: str
    settings: Mapping[str, str]

    def start(self, ranks: range, generation: int = 0) -> Ranks:
        """Starts a part of the ranks, or all."""
        config, world_size = self.config, self.config.world_size
        executor = LocalExecutor(folder=self.attempt.logs)
        executor.update_parameters(
            tasks_per_node=len(ranks),
            gpus_per_node=len(ranks),
            timeout_min=_FOR_EVER_MINUTES,
            stderr_to_stdout=True,
        )
        visible = os.environ.get(env.CUDA_VISIBLE_DEVICES)
        arguments: tuple[Any, ...] = (self.entry, str(self.attempt.path), ProcessId.own(), visible)
        settings = {**rank_environment(config), **nsys_environment(config.profile), **self.settings}
        if len(ranks) < world_size:
            settings |= {
                env.RLHPC_WORLD_SIZE: str(world_size),
                env.RLHPC_FIRST_RANK: str(ranks.start),
                env.RLHPC_FIRST_LOCAL_RANK: str(ranks.start),
                env.RLHPC_GENERATION: str(generation),
            }
        # The launcher handles Ctrl-C; the processes inherit that they ignore it.
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            with environment(settings):
                job = executor.submit(run_local_rank, *arguments)
        finally:
            signal.signal(signal.SIGINT, handler)
        started = Ranks(job, self.attempt.exits, ranks, node_name())
        if len(ranks) < world_size:
            self._link_logs(started)
        return started

    def _link_logs(self, ranks: Ranks) -> None:
        """Names the logs by the run's ranks; submitit names them by its jobs and their tasks."""
        for rank in ranks.ranks:
            link = self.attempt.logs / f"rank-{rank:05d}.log"
            with contextlib.suppress(FileNotFoundError):
                link.unlink()
            link.symlink_to(ranks.log(rank).name)


@dataclass
class _Engine:
    """The ranks of an engine. ``lost_since``: when they were first seen to have failed."""

    ranks: Ranks
    state: EngineLife
    lost_since: float | None = None


@dataclass
class LocalRanks:
    """All ranks of a run. ``groups``: those whose failure ends the attempt; ``engines``: those that may be lost."""

    how: RankStart
    groups: list[Ranks]
    engines: list[_Engine] = field(default_factory=list)
    reported: LostByTrainers | None = None
    losses: int = 0
    _done_since: float | None = None

    @classmethod
    def start(cls, how: RankStart, store: StoreServer) -> LocalRanks:
        """Starts all."""
        roles = roles_of(how.config, how.config.world_size)
        if roles is None or not how.config.may_lose_engines:
            return cls(how, [how.start(range(how.config.world_size))])
        now, first, tp = time.time(), roles.engines.first, roles.tp
        engines = [how.start(range(at, at + tp)) for at in range(first, roles.world_size, tp)]
        found = cls(how, [how.start(range(first))], [_Engine(ranks, EngineLife(since=now)) for ranks in engines])
        found.reported = LostByTrainers(store)
        found._write()
        return found

    def poll(self) -> dict[int, ExitRecord]:
        """Exit records of ranks that have ended, without those of lost engines whose loss ends nothing."""
        ended = {rank: record for group in self.groups for rank, record in group.poll().items()}
        if not self.engines:
            return ended
        failed = any(record.kind not in ("done", "stopped") for record in ended.values())
        if len(ended) == sum(len(group.ranks) for group in self.groups) and self._done_since is None:
            self._done_since = time.monotonic()
        reported = self.reported.read() if self.reported is not None else {}
        for number, engine in enumerate(self.engines):
            own = self._poll_engine(number, engine, reported.get(number), failing=failed)
            ended |= own
        return ended

    def log(self, rank: int) -> Path:
        """Log of a rank."""
        return next(ranks for ranks in self._all if rank in ranks.ranks).log(rank)

    def ask_to_stop(self) -> None:
        """Asks all ranks to finish their step, save and end."""
        for ranks in self._all:
            ranks.ask_to_stop()

    def wait_for_end(self, seconds: float) -> None:
        """Waits for ranks that are done to end by themselves."""
        deadline = time.monotonic() + seconds
        for ranks in self._all:
            ranks.wait_for_end(max(0.0, deadline - time.monotonic()))

    def end(self) -> None:
        """Kills every rank with its children."""
        for ranks in self._all:
            ranks.end()

    @property
    def _all(self) -> list[Ranks]:
        return [*self.groups, *(engine.ranks for engine in self.engines)]

    def _poll_engine(
        self, number: int, engine: _Engine, reported: int | None, *, failing: bool
    ) -> dict[int, ExitRecord]:
        """Records of an engine's ranks, if its end is the run's, or ends it."""
        state = engine.state
        if state.phase != "running":
            if self._done_since is not None or not may_go_on([each.state for each in self.engines]):
                return self._records(engine, "done" if self._done_since is not None else "error")
            if state.phase == "waiting" and time.time() >= state.due and not failing:
                self._start_again(engine)
            return {}
        own = engine.ranks.poll()
        bad = [record for record in own.values() if record.kind not in ("done", "stopped")]
        if failing or self._done_since is not None:
            late = self._done_since is not None and time.monotonic() - self._done_since > _END_SECONDS
            if (late and not failing) or (bad and not failing):  # it was to join, or the trainers did not wait for it
                engine.ranks.end()
                return self._records(engine, "done")
            return own
        if not bad and reported != state.generation:
            return own
        engine.lost_since = engine.lost_since or time.monotonic()
        if bad and time.monotonic() - engine.lost_since < _GRACE_SECONDS:
            return {}
        return self._lose(number, engine, exits.first_failure(bad))

    def _lose(self, number: int, engine: _Engine, failed: ExitRecord | None) -> dict[int, ExitRecord]:
        """Ends what is left of an engine, and decides what becomes of it; its records if the attempt must end."""
        first = engine.ranks.ranks.start
        record = failed or ExitRecord(first, node_name(), 0, time.time(), "error", "PeerLost", "does not answer")
        diagnosis = diagnose_error(record)
        engine.ranks.end()
        state = after_loss(engine.state, diagnosis, self.how.config.recovery, time.time())
        if state is None:
            return {record.rank: record}
        exits.put_aside(self.how.attempt.exits, engine.ranks.ranks, self.how.attempt.former_exits(state.generation))
        engine.state, engine.lost_since, self.losses = state, None, self.losses + 1
        self._write()
        what = "is started again" if state.phase == "waiting" else "is not started again"
        goes_on = "training goes on" if may_go_on([each.state for each in self.engines]) else "no engine is left"
        show(f"rlhpc: engine {number} was lost ({record.message or record.type}), and {what}; {goes_on}")
        return {}

    def _start_again(self, engine: _Engine) -> None:
        engine.state = started_again(engine.state, time.time())
        engine.ranks = self.how.start(engine.ranks.ranks, engine.state.generation)
        self._write()

    def _records(self, engine: _Engine, kind: Any) -> dict[int, ExitRecord]:
        """Records of ranks that are no more."""
        type_, message = ("EngineLost", engine.state.why) if kind != "done" else ("", "")
        return {
            rank: ExitRecord(rank, node_name(), 0, time.time(), kind, type_, message) for rank in engine.ranks.ranks
        }

    def _write(self) -> None:
        EnginesRecord(tuple(engine.state for engine in self.engines), self.losses).write(self.how.attempt)
