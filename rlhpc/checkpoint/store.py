"""Checkpoint folders: written under another name, then renamed, so that a folder with a final name is complete.

checkpoints/step-00000120/state.json    RunState, and every file with its size
                          actor/        the training back end's own format
            hf-00000120/                its actor as a HuggingFace folder, with checkpoint.export
            .writing-0003/              staging folder of the third attempt; removed when a later one begins
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rlhpc.api import BackgroundWrite, RunState
from rlhpc.core.attempts import export_folder
from rlhpc.core.errors import UserError
from rlhpc.core.files import flush, make_folder, names_in, read_json, rename, write_json
from rlhpc.core.folder import AttemptFolder, Superseded
from rlhpc.core.storage import as_storage_error, exists, kind_of, patiently
from rlhpc.parallel.agreement import on_first_rank, together

_NAME = re.compile(r"step-(\d{8})")
_EXPORT = re.compile(r"hf-\d{8}")
_STATE = "state.json"

log = logging.getLogger(__name__)


@dataclass
class Saved:
    """A complete checkpoint."""

    folder: Path
    state: RunState


@dataclass
class _Open:
    """A checkpoint that has not been committed."""

    writing: Path
    final: Path
    state: RunState
    shares: Sequence[BackgroundWrite]


class CheckpointStore:
    """Checkpoints of one run. ``save`` and ``settle`` are collective over all ranks."""

    def __init__(self, attempt: AttemptFolder, keep: int) -> None:
        self._run, self._folder, self._keep = attempt.run, attempt.run.checkpoints, keep
        self._staging = self._folder / f".writing-{attempt.path.name}"
        self._open: _Open | None = None
        self._begun: Path | None = None

    def begin(self, state: RunState) -> Path:
        """Makes the folder that the next ``save`` of this state fills, for those that write into it before. Commits the
        former checkpoint first. Collective."""
        self.settle(wait=True)
        writing = self._staging / _name(state.total_steps)
        with self._user_errors(writing):
            on_first_rank(lambda: self._clear_for(writing))
        self._begun = writing
        return writing

    def save(self, state: RunState, write: Callable[[Path], Sequence[BackgroundWrite] | None]) -> Path:
        """Lets ``write`` fill a new folder on all ranks, then commits it and removes older ones beyond ``keep``, except
        that of ``state.best_step``.

        If ``write`` returns shares that are written in the background, a later ``settle`` commits them, or the next
        save before it begins. A rank killed at any moment leaves the previous checkpoint intact.
        """
        final = self._folder / _name(state.total_steps)
        writing = self._staging / final.name
        if self._begun != writing:
            self.begin(state)
        self._begun = None
        with self._user_errors(writing):
            shares = together(lambda: tuple(write(writing) or ()))
            self._open = _Open(writing, final, replace(state), shares)
        if not self._open.shares:
            self.settle(wait=True)
        return final

    def settle(self, *, wait: bool) -> None:
        """Commits a background save; without ``wait`` only if every rank has written its share."""
        pending = self._open
        if pending is None:
            return
        if not wait:
            done = torch.tensor([int(all(share.done() for share in pending.shares))])
            dist.all_reduce(done, dist.ReduceOp.MIN)
            if not int(done):
                return
        self._open = None
        with self._user_errors(pending.writing):
            together(lambda: [share.finish() for share in pending.shares])
            on_first_rank(lambda: self._commit(pending))

    def latest(self) -> Saved | None:
        """Newest checkpoint whose files all exist with their full size."""
        for folder in reversed(self._named()):
            state, damaged = _read(folder)
            if not damaged:
                return Saved(folder, RunState.from_json(state))
            log.warning("skipping checkpoint %s: %s is missing or truncated", folder, damaged[0])
        return None

    def export(self, step: int, write: Callable[[Path], None]) -> Path:
        """Lets ``write``, called on all ranks, fill the folder of a step's export, then gives it its name and removes
        exports without a checkpoint, except the newest. Collective; a background save may be open."""
        final = export_folder(self._run, step)
        writing = self._staging / final.name
        with self._user_errors(writing, "export the model", "checkpoint"):
            on_first_rank(lambda: self._make_empty(writing))
            together(lambda: write(writing))
            on_first_rank(lambda: self._commit_export(writing, final))
        return final

    def has_export(self, step: int) -> bool:
        """True if the export of a step exists, as the first rank sees it. Collective."""
        found = torch.tensor([int(together(lambda: exists(export_folder(self._run, step))))])
        dist.broadcast(found, src=0)
        return bool(found)

    def has(self, step: int) -> bool:
        """True if the checkpoint of a step exists, with all its files."""
        return not _read(self._folder / _name(step))[1]

    @contextlib.contextmanager
    def _user_errors(
        self, writing: Path, action: str = "save a checkpoint", safe: str = "previous checkpoint"
    ) -> Iterator[None]:
        """Turns errors that the user can fix into a UserError, which names the action and what is safe; Superseded if a
        later attempt removed the folder."""
        try:
            yield
        except OSError as error:
            if not exists(self._staging):
                raise Superseded(f"a later attempt of the run has begun; {writing.name} is not saved") from error
            if kind_of(error) == "transient":
                raise as_storage_error(error, path=str(writing)) from error
            if isinstance(error, ConnectionError):  # a helper process was lost: not an error of the disk
                raise
            remedy = "free disk space or quota" if kind_of(error) == "full" else "check path and permissions"
            raise UserError(
                f"cannot {action} ({error.strerror or error})",
                where=str(writing),
                remedy=f"{remedy}, then resume the run; the {safe} is intact",
            ) from error

    def _clear_for(self, writing: Path) -> None:
        for leftover in names_in(self._staging):
            _remove(self._staging / leftover)
        make_folder(writing)

    def _commit(self, pending: _Open) -> None:
        """Renames a checkpoint to its final name. Each rank has flushed its files, and rewritten them after an error;
        flushing them here is a safeguard."""
        writing, final, state = pending.writing, pending.final, pending.state
        files = patiently(lambda: _files(writing), writing)
        for path in files:
            patiently(functools.partial(flush, path), path)
        sizes = patiently(lambda: {str(path.relative_to(writing)): path.stat().st_size for path in files}, writing)
        write_json(writing / _STATE, {"state": state.to_json(), "files": sizes})
        if exists(final):  # a run resumed from an older checkpoint reaches it again
            rename(final, self._staging / f"former-{final.name}")
        rename(writing, final)
        patiently(lambda: flush(self._folder), self._folder)
        self._remove_old(state)

    def _remove_old(self, state: RunState) -> None:
        """Removes checkpoints beyond ``keep``, and their exports."""
        for old in self._named()[: -self._keep]:
            if old.name == _name(state.best_step):
                continue
            try:
                _remove(old)
            except OSError as error:
                log.warning("%s cannot be removed: %s", old, error)
        self._remove_exports()

    def _make_empty(self, writing: Path) -> None:
        if exists(writing):
            _remove(writing)
        make_folder(writing)

    def _commit_export(self, writing: Path, final: Path) -> None:
        """Renames an export, whose files are on disk, to its final name."""
        for path in patiently(lambda: _files(writing), writing):
            patiently(functools.partial(flush, path), path)
        if exists(final):
            self._withdraw(final)
        rename(writing, final)
        patiently(lambda: flush(self._folder), self._folder)
        self._remove_exports()

    def _remove_exports(self) -> None:
        """Removes exports whose checkpoint is gone, except the newest."""
        saved = {folder.name for folder in self._named()}
        for name in [name for name in names_in(self._folder) if _EXPORT.fullmatch(name)][:-1]:
            if name.replace("hf", "step") not in saved:
                try:
                    self._withdraw(self._folder / name)
                except OSError as error:
                    log.warning("%s cannot be removed: %s", self._folder / name, error)

    def _withdraw(self, export: Path) -> None:
        """Removes an export, which loses its name first: half of one looks complete."""
        former = self._staging / f"former-{export.name}"
        rename(export, former)
        _remove(former)

    def _named(self) -> list[Path]:
        return [self._folder / name for name in names_in(self._folder) if _NAME.fullmatch(name)]


def _name(step: int) -> str:
    return f"step-{step:08d}"


def _read(folder: Path) -> tuple[dict[str, Any], list[str]]:
    """The state of a checkpoint, and its files that are missing or truncated."""
    try:
        document = read_json(folder / _STATE)
        sizes = document["files"].items()
        damaged = [name for name, size in sizes if patiently(functools.partial(_size, folder / name)) != size]
        return document["state"], damaged
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError):
        return {}, [_STATE]


def _files(folder: Path) -> list[Path]:
    def fail(error: OSError) -> None:
        raise error

    found = (Path(root, name) for root, _, names in os.walk(folder, onerror=fail) for name in names)
    return sorted(path for path in found if path.is_file())


def _remove(folder: Path) -> None:
    def check(function: object, path: str, info: Any) -> None:
        if not isinstance(info[1], FileNotFoundError):  # an attempt that reported an error may have removed it
            raise info[1]

    patiently(lambda: shutil.rmtree(folder, onerror=check), folder)


def _size(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() else None
