"""Checkpoint folders of tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rlhpc.core.attempts import begin
from rlhpc.core.folder import AttemptFolder, RunFolder


def begin_attempt(folder: Path) -> AttemptFolder:
    return begin(RunFolder(folder), job_id="", restart_count=0, nodes=("here",), world_size=1, saved_step=-1)


def checkpoint_names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir() if not path.name.startswith("."))


def writes(text: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "weights").write_text(text)

    return write
