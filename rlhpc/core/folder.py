"""The run folder: every path inside it, named once.

The engines' part of a checkpoint: every path inside it, named once.

The folder of a skipped update: every path inside it, named once.
"""

from __future__ import annotations

import stat
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from rlhpc.core.errors import UserError
from rlhpc.core.files import make_folder, names_in
from rlhpc.core.storage import Patience, exists, patiently


class Superseded(RuntimeError):
    """A later attempt of the run exists: these ranks must not write any more."""


@dataclass(frozen=True)
class AttemptFolder:
    """Folder of one attempt."""

    path: Path

    @property
    def number(self) -> int:
        return int(self.path.name)

    @property
    def run(self) -> RunFolder:
        return RunFolder(self.path.parent.parent)

    @property
    def record(self) -> Path:
        """Record of when, where and how the ranks were started (rlhpc.core.attempts)."""
        return self.path / "attempt.json"

    @property
    def verdict(self) -> Path:
        """How it ended, and the action taken (rlhpc.core.attempts)."""
        return self.path / "verdict.json"

    @property
    def restarts(self) -> Path:
        """The same of trainers that were started again within the attempt, one JSON object each; absent without any."""
        return self.path / "restarts.jsonl"

    @property
    def config(self) -> Path:
        """Resolved configuration of this attempt, with changes by recovery, without secrets."""
        return self.path / "config.yaml"

    @property
    def exits(self) -> Path:
        """One start and one exit record of each rank (rlhpc.core.exits)."""
        return self.path / "exits"

    @property
    def logs(self) -> Path:
        """Logs of the ranks."""
        return self.path / "logs"

    @property
    def heartbeats(self) -> Path:
        """Each rank's last progress; after a hang its stacks (rlhpc.core.heartbeat)."""
        return self.path / "heartbeats"

    @property
    def times(self) -> Path:
        """Measured seconds of its start and its checkpoints (rlhpc.core.attempts)."""
        return self.path / "times.json"

    @property
    def engines(self) -> Path:
        """Both sides of a separate placement in the newest step (rlhpc.observe.engine_activity)."""
        return self.path / "engines.json"

    @property
    def engine_losses(self) -> Path:
        """What has become of engines that may be lost alone (rlhpc.launch.supervise.engine_losses)."""
        return self.path / "engine_losses.json"

    def rollout_job_losses(self, job: int) -> Path:
        """The same of the engines of a rollout job."""
        return self.path / f"engine_losses-{job}.json"

    @property
    def store(self) -> Path:
        """Address and secret of its store, for rollout jobs (rlhpc.launch.supervise.rollout_jobs)."""
        return self.path / "store.json"

    def former_exits(self, generation: int) -> Path:
        """Start and exit records of ranks that were started again after so many starts."""
        return self.path / f"exits-{generation}"

    @property
    def generation_record(self) -> Path:
        """What engines did and steps trained on, with asynchrony.schedule arrival (rlhpc.rollout.generator.record)."""
        return self.path / "generation.jsonl"

    @property
    def cost(self) -> Path:
        """Seconds of all its ranks, idle ones, and tokens (rlhpc.observe.cost)."""
        return self.path / "cost.json"

    @property
    def deadline(self) -> Path:
        """Time at which Slurm will end the job, as last reported."""
        return self.path / "deadline.json"

    def nsys_reports(self, rank: int) -> Path:
        """Path of a rank's reports of Nsight Systems, without their numbers and suffix."""
        return self.run.nsys / f"{self.path.name}-rank-{rank:05d}"

    def is_current(self, patience: Patience | None = None) -> bool:
        """Whether no later attempt of the run exists, so that these ranks may write into the run."""
        return not exists(self.run.attempt(self.number + 1).path, patience)

    def check_current(self) -> None:
        """Raises Superseded if a later attempt of the run exists."""
        if not self.is_current():
            raise Superseded(f"a later attempt than {self.path.name} of the run exists")


@dataclass(frozen=True)
class TrackersFolder:
    """Folder of a run's trackers besides TensorBoard (rlhpc.observe.trackers)."""

    path: Path

    @property
    def log(self) -> Path:
        """Output of the process that feeds them, and of their libraries."""
        return self.path / "log.txt"

    @property
    def lock(self) -> Path:
        """Lock of the process that feeds them."""
        return self.path / ".lock"

    def state(self, name: str) -> Path:
        """What a tracker remembers: the id of its run, or its last step."""
        return self.path / f"{name}.json"

    def database(self, name: str) -> Path:
        """SQLite file of an MLflow tracker."""
        return self.path / f"{name}.db"

    def artifacts(self, name: str) -> Path:
        """Files attached to runs of an MLflow tracker without a server."""
        return self.path / f"{name}-artifacts"

    def files(self, name: str) -> Path:
        """Folder of a tracker that writes files of its own."""
        return self.path / name

    @property
    def facts(self) -> Path:
        """Packages, machine, git state and environment of the last attempt, without secrets."""
        return self.path / "facts.json"

    @property
    def diff(self) -> Path:
        """Changes of the user's code that are not committed, without secrets; absent without any."""
        return self.path / "code.diff"


@dataclass(frozen=True)
class RunFolder:
    """Folder that everything of one run is written to. ``path`` is made absolute: ranks may change their folder."""

    path: Path

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", Path(self.path).absolute())

    @property
    def config(self) -> Path:
        """Resolved configuration of the run, without secrets."""
        return self.path / "config.yaml"

    @property
    def secrets(self) -> Path:
        """Values that configurations in this folder show as *** (rlhpc.config.saved); absent without any."""
        return self.path / "secrets.json"

    @property
    def lock(self) -> Path:
        """Lock of the launcher that works in the folder (rlhpc.launch.run_lock)."""
        return self.path / ".lock"

    @property
    def attempts(self) -> Path:
        """One folder per attempt."""
        return self.path / "attempts"

    def attempt(self, number: int) -> AttemptFolder:
        """Folder of one attempt; numbers count from 1 and are never reused."""
        return AttemptFolder(self.attempts / f"{number:04d}")

    @property
    def job(self) -> Path:
        """Slurm job that the run was last submitted as (rlhpc.launch.runs.submit)."""
        return self.path / "job.json"

    @property
    def stop_requested(self) -> Path:
        """Exists if a user has asked the ranks to save and end for good."""
        return self.path / "stop-requested"

    @property
    def submission(self) -> Path:
        """submitit's files: job script and log of the batch step."""
        return self.path / "submission"

    @property
    def rollout_submission(self) -> Path:
        """The same of rollout jobs."""
        return self.path / "rollout-submission"

    @property
    def metrics(self) -> Path:
        """One JSON object per step."""
        return self.path / "metrics.jsonl"

    @property
    def timeline(self) -> Path:
        """Phases of the newest steps on every rank (rlhpc.core.spans)."""
        return self.path / "timeline.jsonl"

    @property
    def samples(self) -> Path:
        """One JSON object per sample that is shown to the user."""
        return self.path / "samples.jsonl"

    @property
    def prometheus(self) -> Path:
        """Metrics of the newest step for Prometheus; absent without observe.prometheus."""
        return self.path / "metrics.prom"

    @property
    def histograms(self) -> Path:
        """Histograms of RL steps, at most observe.histogram_steps lines (rlhpc.core.histograms)."""
        return self.path / "histograms.jsonl"

    @property
    def training_samples(self) -> Path:
        """One Parquet file for each step whose samples are kept (rlhpc.observe.training_samples)."""
        return self.path / "training_samples"

    @property
    def alerts(self) -> Path:
        """One JSON object per alert, the newest ones (rlhpc.observe.alerts.record)."""
        return self.path / "alerts.jsonl"

    @property
    def notes(self) -> Path:
        """The user's notes, one JSON object each (rlhpc.observe.notes)."""
        return self.path / "notes.jsonl"

    @property
    def evaluation(self) -> Path:
        """Result of a run without steps: metrics of the held-out prompts."""
        return self.path / "metrics.json"

    @property
    def skipped_updates(self) -> Path:
        """One folder per skipped update, the newest ones only; absent without any."""
        return self.path / "skipped_updates"

    @property
    def replayed(self) -> Path:
        """Results of a replay."""
        return self.path / "replay.json"

    @property
    def checkpoints(self) -> Path:
        """One folder per checkpoint."""
        return self.path / "checkpoints"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def trackers(self) -> TrackersFolder:
        """State and files of trackers."""
        return TrackersFolder(self.path / "trackers")

    @property
    def profiles(self) -> Path:
        """Profiles: one folder per profiled step, the newest ones only (rlhpc.observe.profiles); absent without any."""
        return self.path / "profiles"

    def profile(self, step: int) -> Path:
        """Folder of one profiled step."""
        return self.profiles / f"step-{step:08d}"

    @property
    def nsys(self) -> Path:
        """Reports of Nsight Systems, of all steps."""
        return self.profiles / "nsys"

    @property
    def profile_request(self) -> Path:
        """Newest request of `rlhpc profile` (rlhpc.core.profiles)."""
        return self.profiles / "request.json"

    @property
    def profile_answer(self) -> Path:
        """What the run has answered to it."""
        return self.profiles / "answer.json"

    @property
    def report(self) -> Path:
        """Folder of the final report."""
        return self.path / "report"

    @property
    def report_text(self) -> Path:
        """Report as plain text, shown at the end of the run."""
        return self.report / "report.txt"

    @property
    def page(self) -> Path:
        """Page of the run, to be opened in a browser (rlhpc.observe.page)."""
        return self.report / "report.html"

    def create(self) -> None:
        """Makes the folder and its fixed parts, readable by the owner alone: nodes are shared. A folder that neither
        this call nor an earlier run made keeps its mode: others may use it."""
        if not patiently(self._make, self.path) and self._has_run():
            patiently(lambda: self.path.chmod(0o700), self.path)
        for part in (self.attempts, self.checkpoints):
            make_folder(part)

    def _make(self) -> bool:
        """Makes the folder, private from the start; False if it exists."""
        try:
            self.path.mkdir(mode=0o700, parents=True)
        except FileExistsError:
            if not self.path.is_dir():
                raise
            return False
        return True

    def _has_run(self) -> bool:
        """Whether ``create`` has worked in the folder."""
        return exists(self.attempts) and exists(self.checkpoints)

    def check_own(self) -> None:
        """Raises UserError if the folder cannot be a run's own: others can write to it, or it has files that a run
        would overwrite but none wrote, such as the configuration it is started with."""
        if not self._has_run():
            self._check_writers()
        if exists(self.attempts) or exists(self.checkpoints):
            return
        lines = (self.metrics, self.samples, self.histograms, self.timeline, self.alerts, self.prometheus)
        for file in (
            self.config,
            self.secrets,
            *lines,
            self.training_samples,
            self.evaluation,
            self.report_text,
            self.page,
        ):
            if exists(file, follow_symlinks=False):
                raise UserError(
                    f"{str(file)!r} was not written by a run, which would overwrite it",
                    where="run_dir",
                    remedy="choose another folder with --run-dir, or move the file away",
                )

    def _check_writers(self) -> None:
        if not exists(self.path):
            return
        mode = patiently(self.path.stat, self.path).st_mode
        if not stat.S_ISDIR(mode):
            raise UserError(f"{str(self.path)!r} is not a folder", where="run_dir", remedy="choose another one")
        if mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise UserError(
                f"others can write to {str(self.path)!r}",
                where="run_dir",
                remedy=f"choose a folder inside that does not exist yet, such as {self.path}/run, or `chmod go-w` it",
            )

    def holds_run(self) -> bool:
        """Whether a run has written steps or a checkpoint here."""

        def has_steps() -> bool:
            return self.metrics.is_file() and self.metrics.stat().st_size > 0

        return patiently(has_steps, self.metrics) or bool(names_in(self.checkpoints, "step-*"))


@dataclass(frozen=True)
class EnginesFolder:
    """Folder of the engines' parts in a checkpoint (rlhpc.rollout.generator.state)."""

    path: Path
    NAME: ClassVar[str] = "engines"

    def groups(self, engine: int) -> Path:
        """Groups of an engine, from their first request until they have been trained on."""
        return self.path / f"engine-{engine:05d}.npz"

    def state(self, engine: int) -> Path:
        """Its schedule and its requests."""
        return self.path / f"engine-{engine:05d}.json"

    def writers(self) -> list[int]:
        """The engines that have written their parts: all, but for those that were lost."""
        return [int(name[7:12]) for name in names_in(self.path, "engine-*.json")]


@dataclass(frozen=True)
class SkippedUpdate:
    """Folder of a skipped update, for a replay (rlhpc.trainer.skipped)."""

    path: Path

    @property
    def record(self) -> Path:
        """Which update it was, and its inputs besides the batches."""
        return self.path / "update.json"

    def batches(self, data: int, stage: int) -> Path:
        """Packed batches of one data-parallel and pipeline rank."""
        return self.path / f"batches-{data:05d}-{stage:03d}.pt"

    @property
    def replay(self) -> Path:
        """Run folder of `rlhpc replay`."""
        return self.path / "replay"
