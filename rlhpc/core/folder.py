"""The run folder: every path inside it, named once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


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
    def logs(self) -> Path:
        """What each rank printed."""
        return self.path / "logs"

    @property
    def exits(self) -> Path:
        """One start and one exit record of each rank (rlhpc.core.exits)."""
        return self.path / "exits"

    @property
    def metrics(self) -> Path:
        """One JSON object per step."""
        return self.path / "metrics.jsonl"

    @property
    def samples(self) -> Path:
        """One JSON object per generated sample that is kept for reading."""
        return self.path / "samples.jsonl"

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
        self.path.mkdir(parents=True, exist_ok=True)
        self.path.chmod(0o700)
        for part in (self.logs, self.exits, self.checkpoints):
            part.mkdir(exist_ok=True)

    def holds_run(self) -> bool:
        """A run has left steps or a checkpoint here."""
        has_steps = self.metrics.is_file() and self.metrics.stat().st_size > 0
        return has_steps or (self.checkpoints.is_dir() and any(self.checkpoints.iterdir()))
