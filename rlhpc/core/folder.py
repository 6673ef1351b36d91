"""The run folder: every path inside it, named once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rlhpc.core.errors import UserError
from rlhpc.core.files import make_folder, names_in
from rlhpc.core.storage import Patience, exists, patiently


class Superseded(RuntimeError):
    """A later start of the run has begun: these ranks may write nothing more."""


@dataclass(frozen=True)
class AttemptFolder:
    """What one start of the ranks leaves."""

    path: Path

    @property
    def number(self) -> int:
        return int(self.path.name)

    @property
    def run(self) -> RunFolder:
        return RunFolder(self.path.parent.parent)

    @property
    def record(self) -> Path:
        """When, where and how the ranks were started (rlhpc.core.attempts)."""
        return self.path / "attempt.json"

    @property
    def verdict(self) -> Path:
        """How it ended and what was done about it (rlhpc.core.attempts)."""
        return self.path / "verdict.json"

    @property
    def config(self) -> Path:
        """The resolved configuration of this start, with what recovery has changed."""
        return self.path / "config.yaml"

    @property
    def exits(self) -> Path:
        """One start and one exit record of each rank (rlhpc.core.exits)."""
        return self.path / "exits"

    @property
    def logs(self) -> Path:
        """What each rank printed."""
        return self.path / "logs"

    @property
    def heartbeats(self) -> Path:
        """Each rank's last progress; after a hang its stacks (rlhpc.core.heartbeat)."""
        return self.path / "heartbeats"

    @property
    def deadline(self) -> Path:
        """When Slurm will end the job, as the launcher last heard."""
        return self.path / "deadline.json"

    def is_current(self, patience: Patience | None = None) -> bool:
        """Whether no later attempt of the run exists, so that these ranks may write into the run."""
        return not exists(self.run.attempt(self.number + 1).path, patience)

    def check_current(self) -> None:
        """Raise Superseded when a later start of the run exists."""
        if not self.is_current():
            raise Superseded(f"a later start than {self.path.name} of the run exists")


@dataclass(frozen=True)
class SkippedUpdate:
    """The batch of an update that was skipped, to be replayed (rlhpc.trainer.skipped)."""

    path: Path

    @property
    def record(self) -> Path:
        """Which update it was, and what it was computed with besides its batches."""
        return self.path / "update.json"

    def batches(self, data: int, stage: int) -> Path:
        """The packed batches of one data-parallel and pipeline rank."""
        return self.path / f"batches-{data:05d}-{stage:03d}.pt"

    @property
    def replay(self) -> Path:
        """The folder of `rlhpc replay`, which is a run folder."""
        return self.path / "replay"


@dataclass(frozen=True)
class RunFolder:
    """Where everything of one run is written. ``path`` is made absolute, so that ranks may change their folder."""

    path: Path

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", Path(self.path).absolute())

    @property
    def config(self) -> Path:
        """The resolved configuration the run was started with."""
        return self.path / "config.yaml"

    @property
    def lock(self) -> Path:
        """Held by the one launcher that is at work in the folder (rlhpc.launch.run_lock)."""
        return self.path / ".lock"

    @property
    def attempts(self) -> Path:
        """One folder per start of the ranks."""
        return self.path / "attempts"

    def attempt(self, number: int) -> AttemptFolder:
        """The folder of one start; numbers count from 1 and are never used again."""
        return AttemptFolder(self.attempts / f"{number:04d}")

    @property
    def job(self) -> Path:
        """Which Slurm job the run was last submitted as (rlhpc.launch.runs.submit)."""
        return self.path / "job.json"

    @property
    def stop_requested(self) -> Path:
        """Is there when a user asked the ranks to save and end for good."""
        return self.path / "stop-requested"

    @property
    def submission(self) -> Path:
        """submitit's files: the job script and what the batch step printed."""
        return self.path / "submission"

    @property
    def metrics(self) -> Path:
        """One JSON object per step."""
        return self.path / "metrics.jsonl"

    @property
    def samples(self) -> Path:
        """One JSON object per generated sample that is kept for reading."""
        return self.path / "samples.jsonl"

    @property
    def evaluation(self) -> Path:
        """What a run without steps has found: metrics of the held-out prompts."""
        return self.path / "metrics.json"

    @property
    def skipped_updates(self) -> Path:
        """One folder per batch whose update was skipped, the newest ones; absent while there is none."""
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
    def report(self) -> Path:
        """Folder of the final report."""
        return self.path / "report"

    @property
    def report_text(self) -> Path:
        """The report as plain text, shown at the end of the run."""
        return self.report / "report.txt"

    def create(self) -> None:
        """Make the folder and its fixed parts, readable by the owner alone: nodes are shared."""
        patiently(lambda: self.path.mkdir(parents=True, exist_ok=True), self.path)
        patiently(lambda: self.path.chmod(0o700), self.path)
        for part in (self.attempts, self.checkpoints):
            make_folder(part)

    def check_own(self) -> None:
        """Refuse a folder with files that a run would write over, though no run made them: the configuration that it is
        started with, for one. Raises UserError."""
        if exists(self.attempts) or exists(self.checkpoints):
            return
        for file in (self.config, self.metrics, self.samples, self.evaluation, self.report_text):
            if exists(file, follow_symlinks=False):
                raise UserError(
                    f"{str(file)!r} was not written by a run, which would overwrite it",
                    where="run_dir",
                    remedy="choose another folder with --run-dir, or move the file away",
                )

    def holds_run(self) -> bool:
        """A run has left steps or a checkpoint here."""

        def has_steps() -> bool:
            return self.metrics.is_file() and self.metrics.stat().st_size > 0

        return patiently(has_steps, self.metrics) or bool(names_in(self.checkpoints, "step-*"))
