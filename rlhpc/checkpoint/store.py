"""Checkpoint folders: written under another name, then renamed, so that what has the right name is whole.

checkpoints/step-00000120/state.json    RunState, and every file with its size
                          actor/        the training back end's own format
            .writing-0003/              where the ranks of the third start write; gone when a later one begins
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from rlhpc.api import RunState
from rlhpc.core.errors import UserError
from rlhpc.core.files import read_json, write_json
from rlhpc.core.folder import AttemptFolder, Superseded

_NAME = re.compile(r"step-(\d{8})")
_STATE = "state.json"

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Saved:
    """One whole checkpoint."""

    folder: Path
    state: RunState


class CheckpointStore:
    """The checkpoints of one run. ``save`` and ``prepare`` are collective over all ranks."""

    def __init__(self, attempt: AttemptFolder, keep: int) -> None:
        self._folder, self._keep = attempt.run.checkpoints, keep
        self._workshop = self._folder / f".writing-{attempt.path.name}"

    def save(self, state: RunState, write: Callable[[Path], None]) -> Path:
        """Let ``write`` fill a new folder on all ranks, then give it its name; older ones beyond ``keep`` go.

        A rank killed at any moment leaves the former checkpoint as it was.
        """
        final = self._folder / f"step-{state.total_steps:08d}"
        writing = self._workshop / final.name
        try:
            if dist.get_rank() == 0:
                for leftover in self._workshop.iterdir():
                    shutil.rmtree(leftover)
                writing.mkdir()
            dist.barrier()
            write(writing)
            dist.barrier()
            if dist.get_rank() == 0:
                self._commit(writing, final, state)
        except OSError as error:
            if not self._workshop.is_dir():
                raise Superseded(f"a later start of the run has begun; {final.name} is not saved") from error
            if isinstance(error, ConnectionError):  # a helper process was lost: that is no matter of the disk
                raise
            raise UserError(
                f"cannot save a checkpoint ({error.strerror or error})",
                where=str(writing),
                remedy="free disk space or quota; the former checkpoint is untouched; then resume the run",
            ) from error
        dist.barrier()
        return final

    def latest(self) -> Saved | None:
        """The newest checkpoint whose files are all there in full."""
        for folder in reversed(self._named()):
            try:
                document = read_json(folder / _STATE)
                damaged = [name for name, size in document["files"].items() if _size(folder / name) != size]
            except (OSError, ValueError, KeyError):
                damaged = [_STATE]
            if not damaged:
                return Saved(folder, RunState(**document["state"]))
            log.warning("%s is passed over: %s is missing or cut short", folder, damaged[0])
        return None

    def _commit(self, writing: Path, final: Path, state: RunState) -> None:
        files = [path for path in sorted(writing.rglob("*")) if path.is_file()]
        for path in files:
            _flush(path)
        sizes = {str(path.relative_to(writing)): path.stat().st_size for path in files}
        write_json(writing / _STATE, {"state": state.to_json(), "files": sizes})
        if final.exists():  # a run resumed from an older checkpoint comes by again
            os.replace(final, self._workshop / f"former-{final.name}")
        os.replace(writing, final)
        _flush(self._folder)
        for old in self._named()[: -self._keep]:
            shutil.rmtree(old)

    def _named(self) -> list[Path]:
        if not self._folder.is_dir():
            return []
        return sorted(path for path in self._folder.iterdir() if _NAME.fullmatch(path.name))


def _size(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() else None


def _flush(path: Path) -> None:
    """Force a file or folder to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
