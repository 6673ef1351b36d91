"""Names of all paths inside a run folder, the engines' part of a checkpoint, and the folder of a skipped update."""

from __future__ import annotations

import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from rlhpc.core.errors import UserError
from rlhpc.core.files import make_folder, names_in
from rlhpc.core.storage import Patience, exists, patiently


class Superseded(RuntimeError):
    """A later attempt of the run exists: these ranks must not write any more."""


class _Inside(property):
    """Path of a file or folder inside the folder that has it as an attribute."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def __get__(self, folder: Any, kind: type | None = None) -> Path:  # type: ignore[override]  # of objects alone
        return Path(folder.path, self._name)


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

    record = _Inside("attempt.json")
    """Record of when, where and how the ranks were started (rlhpc.core.attempts)."""

    verdict = _Inside("verdict.json")
    """Cause of its end, and the action taken (rlhpc.core.attempts)."""

    restarts = _Inside("restarts.jsonl")
    """The same of trainers that were started again within the attempt, one JSON object each; absent without any."""

    config = _Inside("config.yaml")
    """Resolved configuration of this attempt, with changes by recovery, without secrets."""

    exits = _Inside("exits")
    """One start and one exit record of each rank (rlhpc.core.exits)."""

    logs = _Inside("logs")
    """Logs of the ranks."""

    heartbeats = _Inside("heartbeats")
    """Last progress of all ranks; after a hang their stacks (rlhpc.core.heartbeat)."""

    times = _Inside("times.json")
    """Measured seconds of its start and its checkpoints (rlhpc.core.attempts)."""

    engines = _Inside("engines.json")
    """Both sides of a separate placement in the newest step (rlhpc.observe.engine_activity)."""

    engine_losses = _Inside("engine_losses.json")
    """State of engines that may be lost alone (rlhpc.launch.supervise.engine_losses)."""

    def rollout_job_losses(self, job: int) -> Path:
        """Losses of the engines of a rollout job."""
        return self.path / f"engine_losses-{job}.json"

    store = _Inside("store.json")
    """Address and secret of its store, for rollout jobs (rlhpc.launch.supervise.rollout_jobs)."""

    def former_exits(self, generation: int) -> Path:
        """Start and exit records of ranks that were started again after so many starts."""
        return self.path / f"exits-{generation}"

    generation_record = _Inside("generation.jsonl")
    """Record of engines and of batches, with asynchrony.schedule arrival (rlhpc.rollout.generator.record)."""

    cost = _Inside("cost.json")
    """Seconds of all its ranks, idle ones, and tokens (rlhpc.observe.cost)."""

    deadline = _Inside("deadline.json")
    """Time at which Slurm will end the job, as last reported."""

    def nsys_reports(self, rank: int) -> Path:
        """Path of a rank's reports of Nsight Systems, without their numbers and suffix."""
        return self.run.profiles / "nsys" / f"{self.path.name}-rank-{rank:05d}"

    def is_current(self, patience: Patience | None = None) -> bool:
        """True if no later attempt of the run exists, so that these ranks may write into the run."""
        return not exists(self.run.attempt(self.number + 1).path, patience)

    def check_current(self) -> None:
        """Raises Superseded if a later attempt of the run exists."""
        if not self.is_current():
            raise Superseded(f"a later attempt than {self.path.name} of the run exists")


@dataclass(frozen=True)
class TrackersFolder:
    """Folder of a run's trackers besides TensorBoard (rlhpc.observe.trackers)."""

    path: Path

    log = _Inside("log.txt")
    """Output of the process that feeds them, and of their libraries."""

    @property
    def command(self) -> str:
        """Command that sends what they lack after the run."""
        return f"python -m rlhpc.observe.trackers {self.path.parent}"

    def state(self, name: str) -> Path:
        """State of a tracker: the id of its run, its newest step."""
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

    facts = _Inside("facts.json")
    """Packages, machine, git state and environment of the last attempt, without secrets."""


@dataclass(frozen=True)
class RunFolder:
    """Folder that everything of one run is written to. ``path`` is made absolute: ranks may change their folder."""

    path: Path

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", Path(self.path).absolute())

    config = _Inside("config.yaml")
    """Resolved configuration of the run, without secrets."""

    secrets = _Inside("secrets.json")
    """Values that configurations in this folder show as *** (rlhpc.config.saved); absent without any."""

    lock = _Inside(".lock")
    """Lock of the launcher that works in the folder (rlhpc.launch.run_lock)."""

    attempts = _Inside("attempts")
    """One folder per attempt."""

    def attempt(self, number: int) -> AttemptFolder:
        """Folder of one attempt; numbers count from 1 and are never reused."""
        return AttemptFolder(self.attempts / f"{number:04d}")

    job = _Inside("job.json")
    """Slurm job that the run was last submitted as (rlhpc.launch.runs.submit)."""

    stop_requested = _Inside("stop-requested")
    """Exists if a user has asked the ranks to save and end for good."""

    submission = _Inside("submission")
    """submitit's files: job script and log of the batch step."""

    rollout_submission = _Inside("rollout-submission")
    """The same of rollout jobs."""

    metrics = _Inside("metrics.jsonl")
    """One JSON object per step."""

    timeline = _Inside("timeline.jsonl")
    """Phases of the newest steps on every rank (rlhpc.core.spans)."""

    samples = _Inside("samples.jsonl")
    """One JSON object per sample that is shown to the user."""

    histograms = _Inside("histograms.jsonl")
    """Histograms of RL steps, at most observe.histogram_steps lines (rlhpc.core.histograms)."""

    training_samples = _Inside("training_samples")
    """One Parquet file for each step whose samples are kept (rlhpc.observe.training_samples)."""

    alerts = _Inside("alerts.jsonl")
    """One JSON object per alert, the newest ones (rlhpc.observe.alerts.record)."""

    notes = _Inside("notes.jsonl")
    """The user's notes, one JSON object each (rlhpc.observe.notes)."""

    evaluation = _Inside("metrics.json")
    """Result of a run without steps: metrics of the held-out prompts."""

    skipped_updates = _Inside("skipped_updates")
    """One folder per skipped update, the newest ones only; absent without any."""

    checkpoints = _Inside("checkpoints")
    """One folder per checkpoint."""

    tensorboard = _Inside("tensorboard")

    @property
    def trackers(self) -> TrackersFolder:
        """State and files of trackers."""
        return TrackersFolder(self.path / "trackers")

    profiles = _Inside("profiles")
    """Profiles: one folder per profiled step (rlhpc.observe.profiles); absent without any."""

    def profile(self, step: int) -> Path:
        """Folder of one profiled step."""
        return self.profiles / f"step-{step:08d}"

    profile_request = _Inside("profiles/request.json")
    """Request of `rlhpc profile`, until the first rank has read it."""

    report = _Inside("report")
    """Folder of the page, or of an evaluation's table."""

    report_text = _Inside("report/report.txt")
    """Table of an evaluation, shown at its end."""

    page = _Inside("report/report.html")
    """Page of the run, to be opened in a browser (rlhpc.observe.page)."""

    def create(self) -> Self:
        """Makes the folder and its fixed parts, readable by the owner alone: nodes are shared. A folder that neither
        this call nor an earlier run made keeps its mode: others may use it."""
        if not patiently(self._make, self.path) and self._has_run():
            patiently(lambda: self.path.chmod(0o700), self.path)
        for part in (self.attempts, self.checkpoints):
            make_folder(part)
        return self

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
        """True if ``create`` has worked in the folder."""
        return exists(self.attempts) and exists(self.checkpoints)

    def check_own(self) -> None:
        """Raises UserError if the folder cannot be a run's own: others can write to it, or it has files that a run
        would overwrite but none wrote, such as the configuration it is started with."""
        if not self._has_run():
            self._check_writers()
        if exists(self.attempts) or exists(self.checkpoints):
            return
        lines = (self.metrics, self.samples, self.histograms, self.timeline, self.alerts)
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
        """True if a run has written steps or a checkpoint here."""

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
    """Folder of a skipped update (rlhpc.trainer.skipped)."""

    path: Path

    record = _Inside("update.json")
    """Number of the update, and its inputs besides the batches."""

    def batches(self, data: int, stage: int) -> Path:
        """Packed batches of one data-parallel and pipeline rank."""
        return self.path / f"batches-{data:05d}-{stage:03d}.pt"
