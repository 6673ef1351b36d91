"""The folder of a skipped update: every path inside it, named once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


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
