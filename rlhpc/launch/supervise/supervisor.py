"""Starts the ranks of a run, watches them, and recovers from failures.

In a Slurm job it is the batch step: it runs on the first node, serves the rendezvous, and reads earlier attempts from
the run folder, so that a requeued job continues where they ended. A plain sbatch script runs
``python -m rlhpc.launch.supervise.supervisor RUN_FOLDER``. ``local.py`` has it on this machine.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path

from rlhpc.config.load import load_config
from rlhpc.config.saved import save_config
from rlhpc.config.schema import RunConfig
from rlhpc.core import attempts
from rlhpc.core.attempts import Attempt, Verdict, saved_step
from rlhpc.core.errors import UserError
from rlhpc.core.exits import ExitRecord
from rlhpc.core.files import remove
from rlhpc.core.folder import AttemptFolder, RunFolder
from rlhpc.core.storage import Patience, StorageError, exists, kind_of, use
from rlhpc.launch.supervise import rollout_jobs
from rlhpc.launch.supervise.allocation import LAST_SECONDS, Allocation, SlurmAllocation, without_verdict
from rlhpc.launch.supervise.batch_job import BatchJob, Termination, batch_step
from rlhpc.launch.supervise.diagnosis import Diagnosis, Evidence
from rlhpc.launch.supervise.engine_losses import after_former_losses, must_follow_arrival
from rlhpc.launch.supervise.hang_watch import Hang, HangWatch
from rlhpc.launch.supervise.job_ranks import ENGINE_LOST, JobRanks, PartStart
from rlhpc.launch.supervise.job_store import StoreServer
from rlhpc.launch.supervise.node_environment import NotPlaced
from rlhpc.launch.supervise.policy import NO_REQUEUE, Situation, decide, storage_patience
from rlhpc.launch.supervise.side_processes import PAGE_SECONDS, PAGE_STEPS, TRACKER_SECONDS, PageRenewal, TrackerProcess
from rlhpc.launch.supervise.step_ranks import evidence_of
from rlhpc.observe.alerts.job import JobAlerts

_KILLED_SECONDS = 120.0  # for Slurm to end this step after a requeue
_TERMINATED_SECONDS = 3.0  # for the trackers when Slurm ends the job
_POLL_SECONDS = 0.2
# Waits after the first failure: for other ranks to fail; for the cause itself while only lost peers are known.
_GRACE_SECONDS, _CAUSE_SECONDS = 1.5, 5.0


def run_job(run_dir: str, entry: str = "") -> int:
    """Runs the job until it ends or is requeued; returns the exit code. ``entry``: the ranks' program."""
    without_storage = f"; this job ends without a verdict; resume it with: rlhpc resume {run_dir}"
    run = RunFolder(Path(run_dir))

    def supervise(end: Termination) -> int:
        return Supervisor(run, SlurmAllocation(run, BatchJob.from_environ(), end, entry)).run()

    return batch_step(supervise, without_storage)


class Supervisor:
    """Work on a run in one allocation, attempt by attempt."""

    def __init__(self, run: RunFolder, allocation: Allocation) -> None:
        self._run, self._allocation = run, allocation
        self._config = allocation.load()
        # The verdict must not be lost: the supervisor waits for disk space as long as the job lasts.
        patience = storage_patience(self._config.recovery)
        use(Patience(patience, float("inf"), give_up=lambda: allocation.is_over))
        self._before: Verdict | None = None
        self._restarted_at = -1  # saved step when trainers were last started again within the attempt
        self._pages = PageRenewal(run, PAGE_STEPS)
        self._alerts = JobAlerts(run, self._config.observe.alerts)

    def run(self) -> int:
        """Starts attempts until the run has finished or this allocation can do no more.

        If the file system fails for so long that no verdict can be written, the job is requeued, and the next
        supervisor writes it.
        """
        trackers = TrackerProcess(self._run, self._config)
        with self._allocation.guarded(self._config):
            try:
                return self._run_attempts()
            except KeyboardInterrupt:
                return self._interrupted()
            except OSError as error:
                recovery = self._config.recovery
                policy = recovery.storage if isinstance(error, StorageError) else recovery.disk_full
                hopeless = policy == "stop" or kind_of(error) == "permanent"
                if hopeless or self._allocation.is_ending or self._allocation.no_requeue():
                    raise
                self._allocation.log(str(error))
                return self._requeue()
            finally:
                self._alerts.close()
                trackers.end(_TERMINATED_SECONDS if self._is_killed else TRACKER_SECONDS)

    @property
    def _is_killed(self) -> bool:
        """True if Slurm ends this process in seconds."""
        return bool(self._allocation.job_id) and self._allocation.is_ending

    def _run_attempts(self) -> int:
        if taken := self._allocation.lost_at_start():
            return self._leave(taken)
        former = former_verdict(self._run, self._allocation, self._config, self._allocation.seconds_left())
        if former is not None and former.unwritten is not None:
            self._record(former.folder, former.unwritten)
        self._before = former.verdict if former is not None else None
        remove(self._run.stop_requested)  # it applied to earlier ranks
        if self._before is not None and self._before.action == "stop":
            return self._allocation.end(self._before)
        while True:
            verdict = self._before = self._start_once()
            if verdict.cause == "allocation_lost":
                return 1
            if self._allocation.is_ending or verdict.action not in ("retry", "requeue"):
                return self._allocation.end(verdict)
            if verdict.action == "retry":
                self._allocation.log(f"next attempt in {verdict.wait_seconds:.0f} s")
            if not self._pause(verdict.wait_seconds):
                return 1
            if verdict.action == "requeue":
                return self._requeue(verdict.excluded)
            lost = self._allocation.wait()
            if self._allocation.is_ending:
                return 1
            if lost:
                return self._requeue(verdict.excluded) if self._allocation.is_over else self._leave(lost)
            if gone := self._allocation.lost_nodes():  # of a job that goes on without them (--no-kill)
                self._allocation.log(f"the job has lost {', '.join(gone)}")
                return self._requeue(verdict.excluded)

    def _start_once(self) -> Verdict:
        folder, config, attempt = self._begin()
        try:
            with self._allocation.starting(folder, config, attempt) as (how, store):
                evidence = self._watch(how, attempt, store)
            diagnosis = self._allocation.diagnose(evidence)
        except NotPlaced as error:
            diagnosis = self._allocation.diagnose(error.evidence(attempt, config.resources.ranks_per_node))
        except UserError as error:
            diagnosis = Diagnosis("user", str(error))
        situation = self._situation(attempt, diagnosis)
        verdict = decide(diagnosis, config, situation)
        if verdict.cause == "stopped":
            if diagnosis.stopped != "alert" and not exists(self._run.stop_requested):
                verdict = replace(verdict, action="none" if situation.no_requeue else "requeue")
            remove(self._run.stop_requested)  # it applies once
        if self._allocation.is_ending:
            verdict = replace(verdict, action="none")  # Slurm decides on the job
        self._record(folder, verdict)
        ends = verdict.action not in ("retry", "requeue") and verdict.cause != "allocation_lost"
        self._pages.end(PAGE_SECONDS if ends and not self._is_killed else 0.0)
        return verdict

    def _begin(self) -> tuple[AttemptFolder, RunConfig, Attempt]:
        """Folder of the next attempt, its configuration with changes by recovery, and its record."""
        overrides = self._before.overrides if self._before else ()
        excluded = self._before.excluded if self._before else ()
        config = after_former_losses(self._allocation.load(overrides), self._run)
        nodes = self._usable_nodes(config, excluded)
        folder = attempts.begin(
            self._run,
            job_id=self._allocation.job_id,
            restart_count=self._allocation.restart_count,
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
        attempt = attempts.read_attempt(folder)
        assert attempt is not None
        changed = f", with {', '.join(overrides)}" if overrides else ""
        self._allocation.log(
            f"attempt {folder.number}: {attempt.world_size} ranks on {', '.join(nodes)}, "
            f"from {f'step {attempt.saved_step}' if attempt.saved_step >= 0 else 'the beginning'}{changed}",
            routine=self._before is None or self._before.action != "retry",
        )
        return folder, config, attempt

    def _usable_nodes(self, config: RunConfig, excluded: Sequence[str]) -> tuple[str, ...]:
        """The first nodes of the job, as many as slurm.nodes, layout and batches can use. An excluded node is used
        again if Slurm gives no other."""
        first, *others = self._allocation.nodes  # the supervisor runs on the first one
        present = [first, *(node for node in others if node not in excluded)]
        count = self._allocation.usable_nodes(config, len(present))
        if not count and excluded:
            self._allocation.log(f"{', '.join(excluded)} is used again: there are too few nodes without it")
            present = [first, *others]
            count = self._allocation.usable_nodes(config, len(present))
        if not count:
            raise UserError(
                f"{len(present)} nodes are too few or do not divide into the layout",
                where="slurm.nodes",
                remedy="check with `rlhpc run --check`",
            )
        return tuple(present[:count])

    def _watch(self, how: PartStart, attempt: Attempt, store: StoreServer) -> Evidence:
        """Runs the ranks until they end, or ends them on a hang and just before the job's time limit; starts trainers
        again while their engines wait."""
        signal_ranks = self._allocation.signal_ranks
        hangs = HangWatch.of_attempt(how.attempt, how.config, attempt.world_size, store.beats, signal_ranks)
        ranks = JobRanks.start(how, store, self._allocation.log)
        try:
            while True:
                ended, hang = self._watch_ranks(ranks, hangs)
                if hang is not None or not self._start_trainers_again(ranks, attempt, ended):
                    break
                hangs.begin_again()
        finally:
            ranks.end()
            hangs.close()
        return evidence_of(ranks, attempt, ended, hang)

    def _watch_ranks(self, ranks: JobRanks, hangs: HangWatch) -> tuple[dict[int, ExitRecord], Hang | None]:
        """Watches ranks until they are over, or to be ended; exit records so far, and a hang."""
        failed_at, self._allocation.is_watched = float("inf"), True
        while True:
            time.sleep(_POLL_SECONDS)
            self._pages.poll()
            ended, hang = ranks.poll(), hangs.poll()
            self._allocation.look(hangs.phase)
            kinds = {record.kind for record in ended.values()} - {"done", "stopped"}
            if kinds and failed_at == float("inf"):
                failed_at = time.monotonic()
            grace = _CAUSE_SECONDS if kinds == {"peer"} else _GRACE_SECONDS
            is_over = len(ended) == len(ranks.ranks) or time.monotonic() - failed_at > grace
            if is_over or hang is not None or self._allocation.seconds_left() < LAST_SECONDS:
                self._allocation.is_watched = False
                return ended, hang

    def _start_trainers_again(self, ranks: JobRanks, attempt: Attempt, ended: dict[int, ExitRecord]) -> bool:
        """Starts trainers that have failed once more, if the next attempt would differ in nothing else."""
        folder, config = ranks.how.attempt, ranks.how.config
        failed = [record for record in ended.values() if record.kind not in ("done", "stopped")]
        if not failed or any(record.type == ENGINE_LOST for record in failed) or not ranks.may_start_groups_again():
            return False
        if self._allocation.seconds_left() < LAST_SECONDS:
            return False
        verdict = self._decide(evidence_of(ranks, attempt, ended, None), attempt, config)
        same = (verdict.overrides, verdict.excluded) == (attempt.overrides, attempt.excluded)
        if verdict.action != "retry" or not same or must_follow_arrival(config, self._run):
            return False
        whose = f" (rank {verdict.rank} on {verdict.node})" if verdict.rank >= 0 else ""
        self._allocation.log(
            f"the trainers ended, {verdict.cause}{whose}: {verdict.message}; the engines wait for them"
        )
        ranks.end_groups()
        if not self._pause(verdict.wait_seconds) or not ranks.may_start_groups_again():
            return False
        attempts.begin_again(folder, verdict)
        self._before, self._restarted_at = verdict, saved_step(self._run)  # it counts as a restart of the attempt
        self._alerts.report_restart(folder, verdict)
        where = f"step {self._restarted_at}" if self._restarted_at >= 0 else "the beginning"
        self._allocation.log(f"the trainers are started again from {where}")
        ranks.start_groups_again()
        return True

    def _decide(self, evidence: Evidence, attempt: Attempt, config: RunConfig) -> Verdict:
        """The verdict on ranks that have ended, as if the attempt had."""
        diagnosis = self._allocation.diagnose(evidence)
        verdict = decide(diagnosis, config, self._situation(attempt, diagnosis))
        return replace(verdict, action="none") if self._allocation.is_ending else verdict

    def _situation(self, attempt: Attempt, diagnosis: Diagnosis) -> Situation:
        without = [node for node in self._allocation.nodes if node not in (*attempt.excluded, diagnosis.node)]
        return Situation(
            attempt=replace(attempt, saved_step=max(attempt.saved_step, self._restarted_at)),
            before=self._before,
            saved_step=saved_step(self._run),
            now=time.time(),
            seconds_left=self._allocation.seconds_left(),
            usable_without=self._allocation.usable_nodes(self._config, len(without)),
            partition=self._allocation.partition_nodes() if diagnosis.node else (),
            no_requeue=self._allocation.no_requeue(),
            may_retry=self._allocation.may_retry,
        )

    def _leave(self, lost: str) -> int:
        """Ends this batch step without an attempt: this start of the job may not retry, requeue or end it."""
        self._allocation.log(f"this start of the job ends: {lost}")
        return 1

    def _requeue(self, excluded: Sequence[str] = ()) -> int:
        lost = self._allocation.wait(to_start=False)
        if lost:  # scontrol would end the ranks of the requeued job
            return self._leave(lost)
        self._allocation.log("asks Slurm to requeue the job")
        if lost is None or not self._allocation.requeue(excluded):
            self._allocation.log(NO_REQUEUE)
            self._not_requeued()
            return 1
        self._pause(_KILLED_SECONDS)
        return 0

    def _interrupted(self) -> int:
        """Ends the run at once, on Ctrl-C: its ranks have ended."""
        message, known = "ended by Ctrl-C before the ranks had saved", attempts.folders(self._run)
        former = attempts.read_verdict(known[-1]) if known else None
        if former is not None:
            message = f"ended by Ctrl-C in the pause after: {former.message}"
        verdict = Verdict(time.time(), "stopped", message, "stop", overrides=former.overrides if former else ())
        if known and (former is None or former.action == "retry"):
            attempts.end(known[-1], verdict)
            self._pages.end()
        return self._allocation.end(verdict)

    def _not_requeued(self) -> None:
        """Corrects the verdict on the last attempt if its action is to requeue the job."""
        known = attempts.folders(self._run)
        verdict = attempts.read_verdict(known[-1]) if known else None
        if verdict is not None and verdict.action == "requeue":
            self._record(known[-1], replace(verdict, action="stop", message=f"{verdict.message}; {NO_REQUEUE}"))

    def _record(self, folder: AttemptFolder, verdict: Verdict) -> None:
        if not self._allocation.taken_over():  # else the requeued job has written a verdict, and counts by it
            attempts.end(folder, verdict)
            self._alerts.report(folder, verdict)
        if verdict.cause != "finished":
            whose = f" (rank {verdict.rank} on {verdict.node})" if verdict.rank >= 0 else ""
            text = f"attempt {folder.number} ended, {verdict.cause}{whose}: {verdict.message} -> {verdict.action}"
            self._allocation.log(text, routine=verdict.action != "retry")

    def _pause(self, seconds: float) -> bool:
        """Waits; False if no further attempt may begin meanwhile."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not self._allocation.is_ending:
            time.sleep(min(0.2, max(0.0, deadline - time.monotonic())))
        return not self._allocation.is_ending


@dataclass(frozen=True)
class Former:
    """Last attempt before this start of the job. ``verdict``: basis of the next attempt; ``unwritten``: the verdict to
    write, if none was left."""

    folder: AttemptFolder
    verdict: Verdict
    unwritten: Verdict | None = None


def former_verdict(run: RunFolder, job: BatchJob | Allocation, config: RunConfig, seconds_left: float) -> Former | None:
    """The last attempt with its verdict; None before the first. Writes nothing.

    After a stop or in another job, the user has started the run again: failures are counted from zero.
    """
    known = [(folder, attempts.read_attempt(folder)) for folder in attempts.folders(run)]
    begun = [(folder, attempt) for folder, attempt in known if attempt is not None]
    if not begun:
        return None
    folder, attempt = begun[-1]
    unwritten, is_ours = None, bool(job.job_id) and attempt.job_id == job.job_id
    verdict = attempts.read_verdict(folder)
    if verdict is None:
        before = attempts.read_verdict(begun[-2][0]) if len(begun) > 1 else None
        before = next(reversed(attempts.restarts(folder)), before)
        situation = Situation(attempt, before, saved_step(run), time.time(), seconds_left)
        verdict = unwritten = decide(without_verdict(attempt, job), config, situation)
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
