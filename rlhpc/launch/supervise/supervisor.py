"""The batch step of a Slurm job: starts the ranks with srun, watches them, and recovers from failures.

It runs on the job's first node, serves the rendezvous, and reads earlier attempts from the run folder: a requeued job
continues where they ended. A plain sbatch script runs ``python -m rlhpc.launch.supervise.supervisor RUN_FOLDER``.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path

from rlhpc.config.load import absolute_paths, load_config
from rlhpc.config.saved import save_config
from rlhpc.config.schema import RunConfig
from rlhpc.core import attempts
from rlhpc.core.attempts import Attempt, Verdict, saved_step
from rlhpc.core.errors import EXIT_USER_ERROR, UserError
from rlhpc.core.exits import ExitRecord
from rlhpc.core.files import remove
from rlhpc.core.folder import AttemptFolder, RunFolder
from rlhpc.core.shown import read_report
from rlhpc.core.storage import Patience, StorageError, exists, kind_of, use
from rlhpc.core.store_client import StoreAddress
from rlhpc.launch.container import check_runtime
from rlhpc.launch.roles import outlives_nodes
from rlhpc.launch.supervise import allocation, rollout_jobs
from rlhpc.launch.supervise.batch_job import (
    BatchJob,
    Deadline,
    JobGuards,
    Termination,
    batch_step,
    log,
    rendezvous_host,
)
from rlhpc.launch.supervise.diagnosis import Diagnosis, Evidence
from rlhpc.launch.supervise.engine_losses import after_former_losses, must_follow_arrival
from rlhpc.launch.supervise.hang_watch import Hang, HangWatch
from rlhpc.launch.supervise.job_ranks import ENGINE_LOST, JobRanks
from rlhpc.launch.supervise.job_store import StoreServer, preferred_port
from rlhpc.launch.supervise.node_environment import EnvironmentPlace, NotPlaced, environment_on_nodes, remove_from_nodes
from rlhpc.launch.supervise.policy import NO_REQUEUE, Situation, decide, storage_patience
from rlhpc.launch.supervise.side_processes import PAGE_SECONDS, PAGE_STEPS, TRACKER_SECONDS, PageRenewal, TrackerProcess
from rlhpc.launch.supervise.step_ranks import StepRanks, StepStart, evidence_of
from rlhpc.observe.alerts.job import JobAlerts, stopping_alert

# A stop this near to the job's end is due to it (`--signal` of the script, which Slurm may send a minute early); ranks
# that still run in the last seconds will not stop in time.
_NEAR_END_SECONDS, _LAST_SECONDS = 240.0, 4.0
_KILLED_SECONDS = 120.0  # for Slurm to end this step after a requeue
_TERMINATED_SECONDS = 3.0  # for the trackers when Slurm ends the job
_POLL_SECONDS = 0.2
_GRACE_SECONDS = 1.5  # for other parts of the ranks to fail after the first


def run_job(run_dir: str, entry: str = "") -> int:
    """Runs the job until it ends or is requeued; returns the exit code. ``entry``: the ranks' program."""
    without_storage = f"; this job ends without a verdict; resume it with: rlhpc resume {run_dir}"
    return batch_step(lambda end: Supervisor(RunFolder(Path(run_dir)), end, entry).run(), without_storage)


class Supervisor:
    """Work of one job on a run, attempt by attempt."""

    def __init__(self, run: RunFolder, termination: Termination, entry: str) -> None:
        self._run, self._termination, self._entry = run, termination, entry
        self._job = BatchJob.from_environ()
        self._config = rollout_jobs.in_job_of(len(self._job.nodes), absolute_paths(load_config(run.config)))
        self._host = rendezvous_host(self._config.slurm)
        self._deadline = Deadline(self._job)
        # The verdict must not be lost: the supervisor waits for disk space as long as the job lasts.
        use(Patience(storage_patience(self._config.recovery), float("inf"), give_up=self._is_ending))
        self._allocation = allocation.Allocation(self._job, run, lambda: termination.requested)
        self._before: Verdict | None = None
        self._restarted_at = -1  # saved step when trainers were last started again within the attempt
        self._environment: EnvironmentPlace | None = None
        self._pages = PageRenewal(run, PAGE_STEPS)
        self._alerts = JobAlerts(run, self._config.observe.alerts)

    def run(self) -> int:
        """Starts attempts until the run has finished or this job can do no more.

        If the file system fails for so long that no verdict can be written, the job is requeued, and the next
        supervisor writes it.
        """
        trackers = TrackerProcess(self._run, self._config)
        guards = JobGuards(self._job) if outlives_nodes(self._config) else None
        try:
            code = self._run_attempts()
            self._alerts.close()
            return code
        except OSError as error:
            recovery = self._config.recovery
            policy = recovery.storage if isinstance(error, StorageError) else recovery.disk_full
            if self._termination.requested or policy == "stop" or kind_of(error) == "permanent":
                raise
            log(str(error))
            return self._requeue()
        finally:
            if self._environment is not None and not self._termination.requested:
                remove_from_nodes(self._environment, self._job.nodes)
            if guards is not None:
                guards.end()
            trackers.end(_TERMINATED_SECONDS if self._termination.requested else TRACKER_SECONDS)

    def _run_attempts(self) -> int:
        other = allocation.wait_for_record(self._run, self._job, lambda: self._termination.requested)
        if lost := other or self._allocation.lost():
            return self._leave(lost)
        former = former_verdict(self._run, self._job, self._config, self._deadline.seconds_left())
        if former is not None and former.unwritten is not None:
            self._record(former.folder, former.unwritten)
        self._before = former.verdict if former is not None else None
        remove(self._run.stop_requested)  # it applied to earlier ranks
        if self._before is not None and self._before.action == "stop":
            return self._ending(self._before)
        while True:
            verdict = self._before = self._start_once()
            if self._termination.requested:
                log("Slurm ends this job")
                return 1
            if verdict.cause == "allocation_lost":
                return 1
            if verdict.action == "requeue":
                if not self._pause(verdict.wait_seconds):
                    return 1
                return self._requeue(verdict.excluded)
            if verdict.action != "retry":
                return self._ending(verdict)
            log(f"next attempt in {verdict.wait_seconds:.0f} s")
            if not self._pause(verdict.wait_seconds):
                return 1
            lost = allocation.other_job(self._run, self._job) or self._allocation.wait()
            if self._termination.requested:
                return 1
            if lost:
                return self._requeue(verdict.excluded) if self._is_ending() else self._leave(lost)
            if gone := self._job.lost_nodes():  # of a job that goes on without them (--no-kill)
                log(f"the job has lost {', '.join(gone)}")
                return self._requeue(verdict.excluded)

    def _start_once(self) -> Verdict:
        folder, config, attempt = self._begin()
        server = StoreServer.open(config.slurm.port or preferred_port(int(self._job.job_id)))
        try:
            check_runtime(config)
            evidence = self._evidence(folder, config, attempt, server)
            diagnosis = self._explain(self._allocation.diagnose(evidence))
        except UserError as error:
            diagnosis = Diagnosis("user", str(error))
        finally:
            server.close()
        situation = self._situation(attempt, diagnosis)
        verdict = decide(diagnosis, config, situation)
        if verdict.cause == "stopped":
            if diagnosis.stopped != "alert" and not exists(self._run.stop_requested):
                verdict = replace(verdict, action="requeue" if situation.may_requeue else "none")
            remove(self._run.stop_requested)  # it applies once
        if self._termination.requested:
            verdict = replace(verdict, action="none")  # Slurm decides on the job
        self._record(folder, verdict)
        ends = verdict.action not in ("retry", "requeue") and verdict.cause != "allocation_lost"
        self._pages.end(PAGE_SECONDS if ends and not self._termination.requested else 0.0)
        return verdict

    def _begin(self) -> tuple[AttemptFolder, RunConfig, Attempt]:
        """Folder of the next attempt, its configuration with changes by recovery, and its record."""
        overrides = self._before.overrides if self._before else ()
        excluded = self._before.excluded if self._before else ()
        config = after_former_losses(absolute_paths(load_config(self._run.config, overrides)), self._run)
        config = rollout_jobs.in_job_of(len(self._job.nodes), config)
        nodes = self._usable_nodes(config, excluded)
        folder = attempts.begin(
            self._run,
            job_id=self._job.job_id,
            restart_count=self._job.restart_count,
            nodes=nodes,
            world_size=rollout_jobs.world_size(config, len(nodes)),
            saved_step=saved_step(self._run),
            hang_timeout_seconds=config.recovery.hang_timeout_seconds,
            storage_wait_seconds=config.recovery.storage_wait_seconds,
            overrides=overrides,
            excluded=excluded,
        )
        self._restarted_at = -1
        save_config(self._run, config, folder.config)
        self._deadline.follow(folder)
        attempt = attempts.read_attempt(folder)
        assert attempt is not None
        changed = f", with {', '.join(overrides)}" if overrides else ""
        log(
            f"attempt {folder.number}: {attempt.world_size} ranks on {', '.join(nodes)}, "
            f"from {f'step {attempt.saved_step}' if attempt.saved_step >= 0 else 'the beginning'}{changed}"
        )
        return folder, config, attempt

    def _usable_nodes(self, config: RunConfig, excluded: Sequence[str]) -> tuple[str, ...]:
        """The first nodes of the job, as many as slurm.nodes, layout and batches can use. An excluded node is used
        again if Slurm gives no other."""
        first, *others = self._job.nodes  # the supervisor runs on the first one
        present = [first, *(node for node in others if node not in excluded)]
        count = rollout_jobs.usable_nodes(config, len(present))
        if not count and excluded:
            log(f"{', '.join(excluded)} is used again: there are too few nodes without it")
            present = [first, *others]
            count = rollout_jobs.usable_nodes(config, len(present))
        if not count:
            raise UserError(
                f"{len(present)} nodes are too few or do not divide into the layout",
                where="slurm.nodes",
                remedy="check with `rlhpc run --check`",
            )
        return tuple(present[:count])

    def _evidence(self, folder: AttemptFolder, config: RunConfig, attempt: Attempt, server: StoreServer) -> Evidence:
        """Evidence on the ranks that ended, or on the nodes that lack their environment."""
        try:
            with environment_on_nodes(config, attempt, self._job, self._is_ending) as self._environment:
                address = StoreAddress(self._host, server.port, server.secret)
                with rollout_jobs.shared(folder, config, address):
                    return self._watch(folder, config, attempt, server, address)
        except NotPlaced as error:
            self._environment = error.place
            return error.evidence(attempt, config.resources.ranks_per_node)

    def _watch(
        self, folder: AttemptFolder, config: RunConfig, attempt: Attempt, server: StoreServer, address: StoreAddress
    ) -> Evidence:
        """Runs the ranks until they end, or ends them on a hang and just before the job's time limit."""
        how = StepStart(
            config,
            folder,
            attempt.world_size,
            attempt.nodes,
            self._job.groups,
            self._entry,
            address,
            self._end_step,
            self._environment,
        )
        hangs = HangWatch.of_attempt(folder, config, attempt.world_size, server.beats, self._job.signal_ranks)
        ranks: JobRanks[StepRanks] = JobRanks.start(how, server, log)
        return AttemptWatch(
            folder,
            config,
            attempt,
            self._job,
            self._pages,
            decide=lambda evidence: self._decide(evidence, attempt, config),
            is_over=lambda: self._deadline.seconds_left() < _LAST_SECONDS,
            pause=self._pause,
            restarted=lambda verdict: self._restarted(folder, verdict),
            log=log,
        ).watch(ranks, hangs)

    def _decide(self, evidence: Evidence, attempt: Attempt, config: RunConfig) -> Verdict:
        """The verdict on ranks that have ended, as if the attempt had."""
        diagnosis = self._explain(self._allocation.diagnose(evidence))
        verdict = decide(diagnosis, config, self._situation(attempt, diagnosis))
        return replace(verdict, action="none") if self._termination.requested else verdict

    def _restarted(self, folder: AttemptFolder, verdict: Verdict) -> None:
        """Counts a restart of trainers within an attempt as one of the attempt."""
        self._before, self._restarted_at = verdict, saved_step(self._run)
        self._alerts.report_restart(folder, verdict)

    def _end_step(self, name: str) -> None:
        """Ends a job step whose srun is stuck, or all of them."""
        log("srun does not end: it is killed")
        if not self._allocation.lost(to_start=False):  # else these are the ranks of the requeued job
            self._job.end_ranks(name)

    def _explain(self, diagnosis: Diagnosis) -> Diagnosis:
        """The diagnosis corrected by the state of the job: Slurm may have ended it, or its time may be over."""
        left, stopped = self._deadline.seconds_left(), diagnosis.cause == "stopped"
        if diagnosis.cause == "finished" or (diagnosis.cause == "allocation_lost" and left > _LAST_SECONDS + 1):
            return diagnosis
        if diagnosis.stopped == "alert":
            return replace(diagnosis, message=f"checkpointed and ended by {stopping_alert(self._run)}")
        if stopped and not self._termination.requested:
            self._deadline.look()
            left = self._deadline.seconds_left()
            if diagnosis.stopped == "terminated":
                return replace(diagnosis, cause="preempted", message="checkpointed and ended on Slurm's warning")
            near_end = left < _NEAR_END_SECONDS and not exists(self._run.stop_requested)
            if diagnosis.stopped == "deadline" or near_end:
                return replace(diagnosis, cause="time_limit", message="checkpointed before the job's time limit")
        if stopped and diagnosis.stopped == "terminated":  # Slurm gave the ranks the time
            return allocation.stopped_by_slurm(diagnosis, self._job)
        if stopped:
            return diagnosis
        if self._termination.requested:
            return allocation.ended_by_slurm(self._job)
        if left < _LAST_SECONDS + 1:
            return Diagnosis("time_limit", "the job's time ended within a step", detail=diagnosis.detail)
        return diagnosis

    def _situation(self, attempt: Attempt, diagnosis: Diagnosis) -> Situation:
        without = [node for node in self._job.nodes if node not in (*attempt.excluded, diagnosis.node)]
        return Situation(
            attempt=replace(attempt, saved_step=max(attempt.saved_step, self._restarted_at)),
            before=self._before,
            saved_step=saved_step(self._run),
            now=time.time(),
            seconds_left=self._deadline.seconds_left(),
            usable_without=rollout_jobs.usable_nodes(self._config, len(without)),
            partition=self._job.partition_nodes() if diagnosis.node else (),
            may_requeue=self._termination.requested or self._job.may_requeue(),
        )

    def _leave(self, lost: str) -> int:
        """Ends this batch step without an attempt: this start of the job may not retry, requeue or end it."""
        log(f"this start of the job ends: {lost}")
        return 1

    def _requeue(self, excluded: Sequence[str] = ()) -> int:
        lost = allocation.other_job(self._run, self._job) or self._allocation.wait(to_start=False)
        if lost:  # scontrol would end the ranks of the requeued job
            return self._leave(lost)
        log("asks Slurm to requeue the job")
        if lost is None or not self._job.requeue([*self._config.slurm.exclude, *excluded] if excluded else []):
            log(NO_REQUEUE)
            self._not_requeued()
            return 1
        self._pause(_KILLED_SECONDS)
        return 0

    def _not_requeued(self) -> None:
        """Corrects the verdict on the last attempt if its action is to requeue the job."""
        known = attempts.folders(self._run)
        verdict = attempts.read_verdict(known[-1]) if known else None
        if verdict is not None and verdict.action == "requeue":
            self._record(known[-1], replace(verdict, action="stop", message=f"{verdict.message}; {NO_REQUEUE}"))

    def _ending(self, verdict: Verdict) -> int:
        rollout_jobs.cancel_all(self._run)
        if verdict.cause == "finished":
            log(f"finished\n{read_report(self._run)}".rstrip())
            return 0
        if verdict.action == "stop":
            where = f"rank {verdict.rank} on {verdict.node}: " if verdict.rank >= 0 else ""
            log(f"stopped ({verdict.cause.replace('_', ' ')}): {where}{verdict.message}")
            return EXIT_USER_ERROR if verdict.cause in ("user", "data") else 1
        log(f"ended: {verdict.message}")
        return 0

    def _record(self, folder: AttemptFolder, verdict: Verdict) -> None:
        if not self._allocation.taken_over():  # else the requeued job has written a verdict, and counts by it
            attempts.end(folder, verdict)
            self._alerts.report(folder, verdict)
        if verdict.cause != "finished":
            whose = f" (rank {verdict.rank} on {verdict.node})" if verdict.rank >= 0 else ""
            log(f"attempt {folder.number} ended, {verdict.cause}{whose}: {verdict.message} -> {verdict.action}")

    def _is_ending(self) -> bool:
        return self._termination.requested or self._deadline.seconds_left() < _LAST_SECONDS

    def _pause(self, seconds: float) -> bool:
        """Waits; False if Slurm ends this step meanwhile."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not self._termination.requested:
            time.sleep(min(0.2, max(0.0, deadline - time.monotonic())))
        return not self._termination.requested


@dataclass
class AttemptWatch:
    """Watches the ranks of an attempt until they are over, and starts trainers again within it while their engines
    wait.

    ``decide``: gives the verdict on ranks that have ended, as if the attempt had; ``is_over``: true if ranks are ended
    because the job's time is over; ``pause``: waits, false if the job does not go on; ``restarted``: takes the verdict
    on trainers that are started again.
    """

    folder: AttemptFolder
    config: RunConfig
    attempt: Attempt
    job: BatchJob
    pages: PageRenewal
    decide: Callable[[Evidence], Verdict]
    is_over: Callable[[], bool]
    pause: Callable[[float], bool]
    restarted: Callable[[Verdict], object]
    log: Callable[[str], object]

    def watch(self, ranks: JobRanks[StepRanks], hangs: HangWatch) -> Evidence:
        """Watches until the attempt is over, ends all ranks, and returns the evidence on their end."""
        others = rollout_jobs.RolloutJobsWatch(self.folder.run, self.config)
        while True:
            ended, hang = self._watch_ranks(ranks, hangs, others)
            if hang is not None or not self._start_trainers_again(ranks, ended):
                break
            hangs.begin_again()
        ranks.end()
        hangs.close()
        return evidence_of(ranks, self.attempt, ended, self.folder, hang)

    def _watch_ranks(
        self, ranks: JobRanks[StepRanks], hangs: HangWatch, others: rollout_jobs.RolloutJobsWatch
    ) -> tuple[dict[int, ExitRecord], Hang | None]:
        """Watches ranks until they are over, or to be ended; exit records so far, and a hang."""
        failed_at = float("inf")
        while True:
            time.sleep(_POLL_SECONDS)
            self.pages.poll()
            if reason := others.look():
                self.log(f"{reason}; the trainers have no engines: they save and end")
                self.folder.run.stop_requested.touch()
                self.job.ask_ranks_to_stop()
            ended, hang = ranks.poll(), hangs.poll()
            if failed_at == float("inf") and any(record.kind not in ("done", "stopped") for record in ended.values()):
                failed_at = time.monotonic()
            is_over = len(ended) == len(ranks.ranks) or time.monotonic() - failed_at > _GRACE_SECONDS
            if is_over or hang is not None or self.is_over():
                return ended, hang

    def _start_trainers_again(self, ranks: JobRanks[StepRanks], ended: dict[int, ExitRecord]) -> bool:
        """Starts trainers that have failed once more, if the next attempt would differ in nothing else."""
        failed = [record for record in ended.values() if record.kind not in ("done", "stopped")]
        lost = any(record.type == ENGINE_LOST for record in failed)
        if not failed or lost or self.is_over() or not ranks.may_start_groups_again():
            return False
        verdict = self.decide(evidence_of(ranks, self.attempt, ended, self.folder, None))
        same = (verdict.overrides, verdict.excluded) == (self.attempt.overrides, self.attempt.excluded)
        if verdict.action != "retry" or not same or must_follow_arrival(self.config, self.folder.run):
            return False
        whose = f" (rank {verdict.rank} on {verdict.node})" if verdict.rank >= 0 else ""
        self.log(f"the trainers ended, {verdict.cause}{whose}: {verdict.message}; the engines wait for them")
        ranks.end_groups()
        if not self.pause(verdict.wait_seconds) or not ranks.may_start_groups_again():
            return False
        attempts.begin_again(self.folder, verdict)
        self.restarted(verdict)
        step = saved_step(self.folder.run)
        self.log(f"the trainers are started again from {f'step {step}' if step >= 0 else 'the beginning'}")
        ranks.start_groups_again()
        return True


@dataclass(frozen=True)
class Former:
    """Last attempt before this start of the job. ``verdict``: basis of the next attempt; ``unwritten``: the verdict to
    write, if none was left."""

    folder: AttemptFolder
    verdict: Verdict
    unwritten: Verdict | None = None


def former_verdict(run: RunFolder, job: BatchJob, config: RunConfig, seconds_left: float) -> Former | None:
    """The last attempt with its verdict; None before the first. Writes nothing.

    After a stop or in another job, the user has started the run again: failures are counted from zero.
    """
    known = [(folder, attempts.read_attempt(folder)) for folder in attempts.folders(run)]
    begun = [(folder, attempt) for folder, attempt in known if attempt is not None]
    if not begun:
        return None
    folder, attempt = begun[-1]
    unwritten, is_ours = None, attempt.job_id == job.job_id
    verdict = attempts.read_verdict(folder)
    if verdict is None:
        before = attempts.read_verdict(begun[-2][0]) if len(begun) > 1 else None
        before = next(reversed(attempts.restarts(folder)), before)
        situation = Situation(attempt, before, saved_step(run), time.time(), seconds_left)
        verdict = unwritten = decide(allocation.without_verdict(attempt, job), config, situation)
        if is_ours:
            return Former(folder, verdict, unwritten)
    if not is_ours or verdict.action == "stop":
        meant = tuple(change for change in verdict.overrides if _still_holds(change, begun[0][0], config))
        return Former(folder, replace(verdict, action="none", failures=0, excluded=(), overrides=meant), unwritten)
    return Former(folder, replace(verdict, action="none"), unwritten)


def _still_holds(override: str, first: AttemptFolder, config: RunConfig) -> bool:
    """True if a change by recovery still applies: the user has not changed the key since the first attempt."""
    key = override.partition("=")[0].split(".")
    return bool(reduce(getattr, key, config) == reduce(getattr, key, load_config(first.config)))


if __name__ == "__main__":
    run_job(*sys.argv[1:])
