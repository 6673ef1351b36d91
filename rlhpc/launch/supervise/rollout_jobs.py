"""Rollout jobs of a run: their batch step, and their part in the trainers' job.

The batch step starts its engines for each attempt of the trainers' job, and again after losses. Engines join the
trainers, who go on without them (rlhpc.trainer.rejoin): the job may begin late, be preempted and come back. It ends
with the run.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from rlhpc.config.load import absolute_paths, load_config
from rlhpc.config.schema import RunConfig
from rlhpc.core import attempts, env, exits
from rlhpc.core.attempts import Attempt
from rlhpc.core.errors import EXIT_USER_ERROR, StoreError, UserError
from rlhpc.core.exits import ExitRecord
from rlhpc.core.files import read_json, remove, write_atomic
from rlhpc.core.folder import AttemptFolder, RunFolder
from rlhpc.core.storage import NONE, Patience, exists, say, use
from rlhpc.core.store_client import StoreAddress, StoreConnection, reach
from rlhpc.core.store_protocol import Op, ProtocolError, Status, as_number, seconds
from rlhpc.launch.roles import engine_parts, parts_of, rollout_job_engines
from rlhpc.launch.slurm.commands import ask, last_line
from rlhpc.launch.slurm.queue import read_job, read_jobs
from rlhpc.launch.supervise.batch_job import BatchJob, Deadline, Termination, batch_step, log
from rlhpc.launch.supervise.job_ranks import JobRanks, TrainersBoard
from rlhpc.launch.supervise.node_environment import EnvironmentPlace, NotPlaced, environment_on_nodes, remove_from_nodes
from rlhpc.launch.supervise.step_ranks import StepStart
from rlhpc.plan.checks.run import largest_usable
from rlhpc.sharding.placement import placement_of

_QUEUE_SECONDS, _TIMES_GONE = 30.0, 2  # between two looks at the queue; looks that must agree
_CONNECT_SECONDS = 20.0
_POLL_SECONDS, _LOOK_SECONDS = 0.2, 1.0  # between two looks at the ranks, and at the attempt
_ASK_SECONDS = 30.0  # between two questions to Slurm about the trainers' job, while it has no attempt
_RECORD_SECONDS = 60.0  # for `rlhpc submit` to write the record of the jobs
_LAST_SECONDS = 20.0  # before the job's time limit


def in_job_of(nodes: int, config: RunConfig) -> RunConfig:
    """The configuration in a job of so many nodes. All ranks are its own if it has as many as the whole run needs."""
    return config.in_one_job() if nodes >= config.slurm.least_nodes else config


def usable_nodes(config: RunConfig, present: int) -> int:
    """Number of the ``present`` nodes of the trainers' job that layout and batches can use, beside those of rollout
    jobs; 0 if they are too few."""
    others = config.all_rollout_job_nodes
    return max(0, largest_usable(config, present + others) - others)


def world_size(config: RunConfig, nodes: int) -> int:
    """Number of the run's ranks, with those of rollout jobs, if ``nodes`` of the trainers' job are used."""
    return (nodes + config.all_rollout_job_nodes) * config.resources.ranks_per_node


@contextlib.contextmanager
def shared(attempt: AttemptFolder, config: RunConfig, address: StoreAddress) -> Iterator[None]:
    """Context in which rollout jobs find the attempt's store, if there are any."""
    if not config.all_rollout_job_nodes:
        yield
        return
    share_store(attempt, address)
    try:
        yield
    finally:
        forget_store(attempt)


class RolloutJobsWatch:
    """Detects that trainers without engines of their own wait in vain: no rollout job runs or can ever start."""

    def __init__(self, run: RunFolder, config: RunConfig) -> None:
        self._needed = bool(config.all_rollout_job_nodes) and len(parts_of(config, config.world_size)) == 1
        self._run, self._looked, self._gone = run, time.monotonic(), 0

    def look(self) -> str:
        """Reason why there will be no engines, once; empty before. It takes two answers of Slurm, which is asked
        seldom."""
        if not self._needed or time.monotonic() - self._looked < _QUEUE_SECONDS:
            return ""
        self._looked = time.monotonic()
        job, cluster = rollout_job_of(self._run)
        try:
            known = read_jobs([job], cluster) if job else {}
        except UserError:
            return ""
        live = [status for status in known.values() if status.live]
        hopeless = [status for status in live if status.queued and status.why.kind == "never"]
        self._gone = 0 if len(hopeless) < len(live) or not job else self._gone + 1
        self._needed = self._gone < _TIMES_GONE
        if self._needed or not hopeless:
            return "" if self._needed else "all rollout jobs have ended"
        why, where = hopeless[0].why, hopeless[0].why.key.replace("slurm.", "slurm.rollout_jobs.", 1)
        reason = f"it {why.words} ({hopeless[0].reason}); {where}: {why.remedy}"
        return f"rollout job {hopeless[0].job_id} can never start, because {reason}"


def rollout_job_of(run: RunFolder) -> tuple[str, str]:
    """Id of the run's rollout jobs, of an array if there are several, and their cluster; empty without any."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        known = read_json(run.job, NONE)
        return str(known.get("rollout_job", "")), str(known.get("cluster", ""))
    return "", ""


def cancel_all(run: RunFolder) -> None:
    """Cancels the run's rollout jobs, which would see its end only when they start or look."""
    job, cluster = rollout_job_of(run)
    if not job:
        return
    try:
        answer = ask("scancel", job, cluster=cluster)
    except UserError as error:
        say(f"the rollout jobs {job} are not cancelled: {error}")
    else:
        if answer.code:
            say(f"the rollout jobs {job} are not cancelled: {last_line(answer.err)}")


def share_store(attempt: AttemptFolder, address: StoreAddress) -> None:
    """Writes the address, with the secret, where only the user can read it."""
    known = {"host": address.host, "port": address.port, "secret": address.secret.hex()}
    write_atomic(attempt.store, json.dumps(known), private=True)


def forget_store(attempt: AttemptFolder) -> None:
    """Removes the address of a store that has ended."""
    remove(attempt.store)


def find_store(attempt: AttemptFolder) -> StoreAddress | None:
    """Address of the store; None if the attempt has none, or not yet."""
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        known = read_json(attempt.store, NONE)
        return StoreAddress(str(known["host"]), int(known["port"]), bytes.fromhex(known["secret"]))
    return None


class SharedStore:
    """Connection of a rollout job to the store of an attempt, which ends with the attempt's launcher."""

    def __init__(self, connection: StoreConnection) -> None:
        self._connection, self.lost = connection, False

    @classmethod
    def connect(cls, address: StoreAddress) -> SharedStore | None:
        """Connects; None if the launcher does not answer: it has ended, or it has another store."""
        with contextlib.suppress(StoreError):
            return cls(reach(address, _CONNECT_SECONDS))
        return None

    def read(self, key: str) -> bytes | None:
        """A value, None if it is not there, or if the connection is ``lost``."""
        name = key.encode()
        try:
            _, found = self._connection.call(Op.CHECK, [name])
            if not as_number(found[0]):
                return None
            status, values = self._connection.call(Op.GET, [seconds(0.0), name])
        except (OSError, ProtocolError):
            self.lost = True
            return None
        return values[0] if status == Status.DONE else None

    def close(self) -> None:
        """Closes the connection."""
        self._connection.close()


def run_rollout_job(run_dir: str) -> int:
    """Runs the job until the run is over, or until it is requeued; returns the exit code."""

    def run(termination: Termination) -> int:
        folder, job = RunFolder(Path(run_dir)), BatchJob.from_environ()
        use(Patience(load_config(folder.config).recovery.storage_wait_seconds))
        number = int(os.environ.get(env.SLURM_ARRAY_TASK_ID, "0"))
        return RolloutJob(folder, job, number, termination, Deadline(job)).run()

    return batch_step(run)


@dataclass
class RolloutJob:
    """A rollout job in its batch step. ``number``: its number among the run's rollout jobs, from 0."""

    run_folder: RunFolder
    job: BatchJob
    number: int
    termination: Termination
    deadline: Deadline
    _served: set[int] = field(default_factory=set)  # attempts whose engines have ended
    _asked: float = float("-inf")
    _environment: EnvironmentPlace | None = None

    def run(self) -> int:
        """Serves attempts until the run is over or this job ends."""
        try:
            return self._serve_attempts()
        finally:
            if self._environment is not None and not self.termination.requested:
                remove_from_nodes(self._environment, self.job.nodes)

    def _serve_attempts(self) -> int:
        if not self._is_of_run():
            log(f"this job ends: {self.run_folder.job} does not name it")
            return 1
        while not self._is_ending:
            attempt = self._present_attempt()
            store = self._connect(attempt) if attempt is not None else None
            if attempt is not None and store is not None:
                failed = self._serve(attempt, *store)
                if failed is not None:
                    log(f"stopped: rank {failed.rank} on {failed.node}: {failed.message or failed.type}")
                    return EXIT_USER_ERROR if failed.type == UserError.__name__ else 1
            elif self._run_is_over():
                log("the run is over")
                return 0
            else:
                time.sleep(_LOOK_SECONDS)
        if self.termination.requested:
            log("Slurm ends this job")
            return 1
        log("the job's time ends: asks Slurm to requeue it")
        return 0 if self.job.requeue([]) else 1

    @property
    def _is_ending(self) -> bool:
        return self.termination.requested or self.deadline.seconds_left() < _LAST_SECONDS

    def _is_of_run(self) -> bool:
        """True if the run's record names this job, after time for it to be written."""
        end = time.monotonic() + _RECORD_SECONDS
        while rollout_job_of(self.run_folder)[0] != self.job.name.partition("_")[0]:
            if time.monotonic() > end or self._is_ending:
                return False
            time.sleep(_LOOK_SECONDS)
        return True

    def _present_attempt(self) -> AttemptFolder | None:
        """The newest attempt, if it goes on and its engines have not ended here."""
        known = attempts.folders(self.run_folder)
        newest = known[-1] if known else None
        if newest is None or newest.number in self._served or exists(newest.verdict):
            return None
        return newest

    def _connect(self, attempt: AttemptFolder) -> tuple[StoreAddress, SharedStore] | None:
        address = find_store(attempt)
        store = SharedStore.connect(address) if address is not None else None
        return (address, store) if address is not None and store is not None else None

    def _run_is_over(self) -> bool:
        """True if Slurm reports that the trainers' job has ended; it is asked seldom."""
        if time.monotonic() - self._asked < _ASK_SECONDS:
            return False
        self._asked = time.monotonic()
        try:
            known = read_json(self.run_folder.job, NONE)
            status = read_job(known["job_id"], known.get("cluster"))
        except (UserError, OSError, ValueError, LookupError):
            return False
        return status is None or not status.live

    def _serve(self, folder: AttemptFolder, address: StoreAddress, store: SharedStore) -> ExitRecord | None:
        """Runs the engines of an attempt until it ends, or this job; returns the record of a repeatable error."""
        config, attempt = absolute_paths(load_config(folder.config)), attempts.read_attempt(folder)
        assert attempt is not None, f"{folder.record} is written first"
        try:
            here = replace(attempt, nodes=self.job.nodes)
            with environment_on_nodes(config, here, self.job, lambda: self._is_ending) as self._environment:
                start = self._start(config, folder, attempt, address)
                return self._watch(replace(start, environment=self._environment), store)
        except NotPlaced as error:
            self._environment = error.place
            raise UserError(str(error), where="slurm.environment_archive", remedy="see the lines above") from None
        finally:
            store.close()

    def _start(self, config: RunConfig, folder: AttemptFolder, attempt: Attempt, address: StoreAddress) -> StepStart:
        size, job = attempt.world_size, self.job
        first = placement_of(config, size).leader_of(self._engines(config, size).start)
        return StepStart(config, folder, size, job.nodes, job.groups, "", address, job.end_ranks, first_rank=first)

    def _engines(self, config: RunConfig, world_size: int) -> range:
        return rollout_job_engines(config, placement_of(config, world_size), self.number)

    def _watch(self, start: StepStart, store: SharedStore) -> ExitRecord | None:
        placement, folder = placement_of(start.config, start.world_size), start.attempt
        engines = self._engines(start.config, start.world_size)
        names = f"engine{'s' * (len(engines) > 1)} {', '.join(map(str, engines))}"
        log(f"attempt {folder.number}: {names} on {', '.join(self.job.nodes)}")
        parts = dict(zip(engines, engine_parts(placement, engines), strict=True))
        board = TrainersBoard(store.read)
        ranks = JobRanks.start_engines(start, parts, folder.rollout_job_losses(self.number), board, log)
        looked = time.monotonic()
        try:
            while not self._is_ending:
                time.sleep(_POLL_SECONDS)
                ended = ranks.poll()
                failed = exits.first_failure(list(ended.values()))
                if failed is not None and not self._attempt_is_over(folder, store):
                    return failed
                if len(ended) == len(ranks.ranks):
                    break
                if time.monotonic() - looked > _LOOK_SECONDS:
                    looked = time.monotonic()
                    if store.lost or self._attempt_is_over(folder, store):
                        break
        finally:
            ranks.end()
        if store.lost and not exists(folder.verdict):
            log(f"attempt {folder.number}: its store does not answer")
        elif not self._is_ending:
            self._served.add(folder.number)
            log(f"attempt {folder.number} has ended")
        return None

    def _attempt_is_over(self, folder: AttemptFolder, store: SharedStore) -> bool:
        """True if the trainers' launcher has ended the attempt, or has ended itself."""
        store.read("")  # notes a lost connection
        return store.lost or exists(folder.verdict)
