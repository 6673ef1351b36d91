"""Checkpoint folders: written under another name, then renamed, so that what has the right name is whole.

checkpoints/step-00000120/state.json    RunState, and every file with its size
                          actor/        the training back end's own format
            .writing-0003/              where the ranks of the third start write; gone when a later one begins
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist

from rlhpc.api import BackgroundWrite, RunState
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


@dataclass(frozen=True)
class _Open:
    """A checkpoint that has no name yet."""

    writing: Path
    final: Path
    state: RunState
    shares: Sequence[BackgroundWrite]


class CheckpointStore:
    """The checkpoints of one run. ``save`` and ``settle`` are collective over all ranks."""

    def __init__(self, attempt: AttemptFolder, keep: int) -> None:
        self._folder, self._keep = attempt.run.checkpoints, keep
        self._workshop = self._folder / f".writing-{attempt.path.name}"
        self._open: _Open | None = None

    def save(self, state: RunState, write: Callable[[Path], Sequence[BackgroundWrite] | None]) -> Path:
        """Let ``write`` fill a new folder on all ranks, then give it its name; older ones beyond ``keep`` go.

        Where ``write`` leaves shares to the background, the name is given by a later ``settle``, or by the next save
        before it begins. A rank killed at any moment leaves the former checkpoint as it was.
        """
        self.settle(wait=True)
        final = self._folder / f"step-{state.total_steps:08d}"
        writing = self._workshop / final.name
        with self._plainly(writing):
            if dist.get_rank() == 0:
                for leftover in self._workshop.iterdir():
                    shutil.rmtree(leftover)
                writing.mkdir()
            dist.barrier()
            self._open = _Open(writing, final, replace(state), tuple(write(writing) or ()))
        if not self._open.shares:
            self.settle(wait=True)
        return final

    def settle(self, wait: bool) -> None:
        """End a save that is in the background; without ``wait`` only if every rank has written its share."""
        pending = self._open
        if pending is None:
            return
        if not wait:
            done = torch.tensor([int(all(share.done() for share in pending.shares))])
            dist.all_reduce(done, dist.ReduceOp.MIN)
            if not int(done):
                return
        self._open = None
        with self._plainly(pending.writing):
            for share in pending.shares:
                share.finish()
            dist.barrier()
            if dist.get_rank() == 0:
                self._commit(pending)
        dist.barrier()

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

    @contextlib.contextmanager
    def _plainly(self, writing: Path) -> Iterator[None]:
        """What the file system refuses is one line for the user, unless a later start has taken the folder away."""
        try:
            yield
        except OSError as error:
            if not self._workshop.is_dir():
                raise Superseded(f"a later start of the run has begun; {writing.name} is not saved") from error
            if isinstance(error, ConnectionError):  # a helper process was lost: that is no matter of the disk
                raise
            raise UserError(
                f"cannot save a checkpoint ({error.strerror or error})",
                where=str(writing),
                remedy="free disk space or quota; the former checkpoint is untouched; then resume the run",
            ) from error

    def _commit(self, pending: _Open) -> None:
        writing, final, state = pending.writing, pending.final, pending.state
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
