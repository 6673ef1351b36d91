"""Where a conversion is written until it is whole: a hidden folder beside the target.

.NAME.converting/plan.json    which plan the pieces are of
                 pieces/7.json  written when piece 7 is on disk: where its items lie, and their CRC-32
                 target/      what will be the target
                 former/      what the target replaces, for a moment
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhpc.convert.plan import ConversionPlan, Piece
from rlhpc.core.errors import UserError
from rlhpc.core.files import read_json

_NOTE = "plan.json"
Items = list[list[int]]  # of each item of a piece: start in the file, length, CRC-32 of its elements


@dataclass(frozen=True)
class Workshop:
    path: Path

    @classmethod
    def beside(cls, target: Path) -> Workshop:
        """The one of a target folder."""
        return cls(target.absolute().parent / f".{target.name}.converting")

    @property
    def target(self) -> Path:
        return self.path / "target"

    @property
    def pieces(self) -> Path:
        return self.path / "pieces"

    @property
    def former(self) -> Path:
        return self.path / "former"

    @property
    def folders(self) -> tuple[Path, ...]:
        """Where files are written and removed."""
        return self.pieces, self.target, self.former

    def check(self) -> None:
        """Refuse a folder of this name that holds anything but a conversion's own plain files: what is in it is written
        in place and removed. Raises UserError."""
        if not os.path.lexists(self.path):
            return
        foreign = next(self._foreign(), None)
        if foreign is not None:
            raise UserError(
                f"{foreign.name!r} in it is a link, has a second name, or was not written by a conversion",
                where=str(self.path),
                remedy="move this folder away; the conversion then starts afresh",
            )

    def prepare(self, plan: ConversionPlan) -> bool:
        """Make the folders; what is there of another plan goes. Returns whether there was any."""
        with open(self.path / "lock-prepare", "w") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX)  # shares begin together, and one must not empty what another fills
            return self._prepare(plan)

    def _prepare(self, plan: ConversionPlan) -> bool:
        note = self.path / _NOTE
        known = _read(note).get("digest") if note.is_file() else None
        other = known is not None and known != plan.digest
        if known != plan.digest or not self.target.is_dir():
            for folder in (self.pieces, self.target):  # in this order: a piece that counts as done has its file
                _empty(folder)
            _write(note, {"digest": plan.digest})
        self.pieces.mkdir(exist_ok=True)
        self.target.mkdir(exist_ok=True)
        for file in plan.files:
            with open(self.target / file.name, "ab") as handle:
                handle.truncate(file.size)
        return other

    @contextlib.contextmanager
    def locked(self, share: str = "") -> Iterator[None]:
        """Nobody else works on the same target; with a share's name, nobody else on the same share."""
        self.path.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as stack:
            for name, kind in [("lock", fcntl.LOCK_SH if share else fcntl.LOCK_EX), (f"lock-{share}", fcntl.LOCK_EX)]:
                handle = stack.enter_context(open(self.path / name, "w"))
                try:
                    fcntl.flock(handle, kind | fcntl.LOCK_NB)
                except BlockingIOError:
                    raise UserError(
                        "another conversion is writing here", where=str(self.path), remedy="wait for it"
                    ) from None
            yield

    def done(self, piece: Piece) -> Items | None:
        """Where the items of a finished piece lie; None for one that is still to be done."""
        found: Items | None = _read(self.pieces / f"{piece.number}.json").get("items")
        return found if (self.target / piece.file).is_file() else None

    def finish(self, piece: Piece, items: Items) -> None:
        """Note that a piece is on disk."""
        _write(self.pieces / f"{piece.number}.json", {"items": items})

    def publish(self, target: Path) -> None:
        """Give what is written its name, in the place of what had it. Chunks are on disk since their piece was."""
        for file in self.target.iterdir():
            if file.suffix != ".distcp":
                flush(file)
        flush(self.target)
        if target.exists():
            _remove(self.former)
            os.replace(target, self.former)
        os.replace(self.target, target)
        flush(target.parent)
        with contextlib.suppress(OSError):  # the target is complete
            self._discard()

    def _discard(self) -> None:
        """Remove the folder, the note by which it is known last."""
        for folder in self.folders:
            _remove(folder)
        for name in sorted(os.listdir(self.path), key=lambda name: name == _NOTE):
            os.unlink(self.path / name)
        os.rmdir(self.path)

    def _foreign(self) -> Iterator[Path]:
        """What in it no conversion has made."""
        if not _is_folder(self.path):
            yield self.path
            return
        folders = [folder for folder in self.folders if _is_folder(folder)]
        noted = (self.path / _NOTE).is_file()
        for path in sorted(self.path.iterdir()):
            if path in folders:
                if not noted:
                    yield path
            elif not (path.name.startswith(("lock", "plan.")) and _is_plain(path)):
                yield path
        for folder in folders:
            for path in sorted(folder.iterdir()):
                if _is_folder(path) or (folder != self.former and not _is_plain(path)):
                    yield path


def _write(path: Path, value: dict[str, Any]) -> None:
    """Whole or not at all while the machine runs. What it loses when it stops is done again, so nothing waits here."""
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(json.dumps(value), encoding="utf-8")
    os.replace(temporary, path)


def _read(path: Path) -> dict[str, Any]:
    try:
        return dict(read_json(path))
    except (OSError, ValueError, TypeError):
        return {}


def flush(path: Path) -> None:
    """Force a file or folder to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _is_plain(path: Path) -> bool:
    """A file of one name, or one that another job has removed meanwhile."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return True
    return stat.S_ISREG(status.st_mode) and status.st_nlink == 1


def _empty(folder: Path) -> None:
    """Remove the files of a folder, if it is there; a folder in it is an OSError."""
    if folder.exists():
        for path in folder.iterdir():
            path.unlink(missing_ok=True)


def _remove(folder: Path) -> None:
    """Remove a folder of files, if it is there."""
    _empty(folder)
    with contextlib.suppress(FileNotFoundError):
        folder.rmdir()
