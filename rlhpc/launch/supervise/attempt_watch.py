"""Watches the ranks of an attempt until they are over; starts trainers again within it while their engines wait."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from rlhpc.config.schema import RunConfig
from rlhpc.core import attempts
from rlhpc.core.attempts import Attempt, Verdict, saved_step
from rlhpc.core.exits import ExitRecord
from rlhpc.core.folder import AttemptFolder
from rlhpc.launch.supervise import rollout_jobs
from rlhpc.launch.supervise.batch_job import BatchJob
from rlhpc.launch.supervise.diagnosis import Evidence
from rlhpc.launch.supervise.engine_losses import must_follow_arrival
from rlhpc.launch.supervise.hang_watch import Hang, HangWatch
from rlhpc.launch.supervise.job_ranks import ENGINE_LOST, JobRanks
from rlhpc.launch.supervise.page_renewal import PageRenewal
from rlhpc.launch.supervise.step_ranks import StepRanks, evidence_of

_POLL_SECONDS = 0.2
_GRACE_SECONDS = 1.5  # for other parts of the ranks to fail after the first


@dataclass
class AttemptWatch:
    """``judge``: the verdict on ranks that have ended, as if the attempt had; ``is_over``: whether ranks are ended,
    because the job's time is over; ``pause``: waits, and says whether the job goes on; ``restarted``: takes the verdict
    on trainers that are started again."""

    folder: AttemptFolder
    config: RunConfig
    attempt: Attempt
    job: BatchJob
    pages: PageRenewal
    judge: Callable[[Evidence], Verdict]
    is_over: Callable[[], bool]
    pause: Callable[[float], bool]
    restarted: Callable[[Verdict], object]
    log: Callable[[str], object]

    def watch(self, ranks: JobRanks[StepRanks], hangs: HangWatch) -> Evidence:
        """Watches until the attempt is over; ends all ranks. How they ended."""
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
        verdict = self.judge(evidence_of(ranks, self.attempt, ended, self.folder, None))
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
