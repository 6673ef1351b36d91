"""Hidden folder beside the target, in which a conversion is written until it is complete.

.NAME.converting/plan.json      digest of the plan that the pieces belong to
                 pieces/7.json  written when piece 7 is on disk: place and CRC-32 of its items
                 target/        becomes the target
                 former/        briefly, the folder that the target replaces
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
from rlhpc.core.files import flush, read_json

_PLAN = "plan.json"
Items = list[list[int]]  # for each item of a piece: start in the file, length, CRC-32 of its elements


@dataclass(frozen=True)
class Staging:
    """Such a folder, by its path."""

    path: Path

    @classmethod
    def beside(cls, target: Path) -> Staging:
        """Staging folder of a target."""
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
        """Folders in which files are written and removed."""
        return self.pieces, self.target, self.former

    def check(self) -> None:
        """Refuses an existing folder that contains anything but a conversion's own plain files.

        Its contents will be overwritten and removed. Raises UserError.
        """
        if not os.path.lexists(self.path):
            return
        foreign = next(self._foreign(), None)
        if foreign is not None:
            raise UserError(
                f"{foreign.name!r} in it is a link, has a second hard link, or was not written by a conversion",
                where=str(self.path),
                remedy="move this folder away; the conversion then starts over",
            )

    def prepare(self, plan: ConversionPlan) -> bool:
        """Creates the folders and removes the pieces of another plan; returns whether there were any."""
        with open(self.path / "lock-prepare", "w") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX)  # shares start together: one must not empty what another fills
            return self._prepare(plan)

    def _prepare(self, plan: ConversionPlan) -> bool:
        file = self.path / _PLAN
        known = _read(file).get("digest") if file.is_file() else None
        other = known is not None and known != plan.digest
        if known != plan.digest or not self.target.is_dir():
            for folder in (self.pieces, self.target):  # in this order: a recorded piece always has its file
                _empty(folder)
            _write(file, {"digest": plan.digest})
        self.pieces.mkdir(exist_ok=True)
        self.target.mkdir(exist_ok=True)
        for piece in plan.pieces:
            (self.target / piece.file).parent.mkdir(exist_ok=True)
        for file in plan.files:
            with open(self.target / file.name, "ab") as handle:
                handle.truncate(file.size)
        return other

    @contextlib.contextmanager
    def locked(self, share: str = "") -> Iterator[None]:
        """Locks out other conversions to the same target; with a share's name, only of the same share."""
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

    def items_of(self, piece: Piece) -> Items | None:
        """Places of a finished piece's items; None for a piece that is not finished."""
        found: Items | None = _read(self.pieces / f"{piece.number}.json").get("items")
        return found if (self.target / piece.file).is_file() else None

    def record(self, piece: Piece, items: Items) -> None:
        """Records that a piece is on disk."""
        _write(self.pieces / f"{piece.number}.json", {"items": items})

    def publish(self, target: Path) -> None:
        """Renames the result to the target and replaces what had that name. Chunks were flushed with their pieces."""
        for file in sorted(self.target.rglob("*"), reverse=True):
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
        """Removes the folder, and last the file that identifies it."""
        for folder in self.folders:
            _remove(folder)
        for name in sorted(os.listdir(self.path), key=lambda name: name == _PLAN):
            os.unlink(self.path / name)
        os.rmdir(self.path)

    def _foreign(self) -> Iterator[Path]:
        """Entries that no conversion has written."""
        if not _is_folder(self.path):
            yield self.path
            return
        folders = [folder for folder in self.folders if _is_folder(folder)]
        identified = (self.path / _PLAN).is_file()
        for path in sorted(self.path.iterdir()):
            if path in folders:
                if not identified:
                    yield path
            elif not (path.name.startswith(("lock", "plan.")) and _is_plain(path)):
                yield path
        for folder in folders:
            for path in sorted(folder.rglob("*")):
                inner = _is_folder(path) and folder != self.pieces and path.parent == folder
                if not inner and folder != self.former and not _is_plain(path):
                    yield path


def _write(path: Path, value: dict[str, Any]) -> None:
    """Writes a file atomically, without fsync: a piece whose record a crash of the machine loses is written again."""
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(json.dumps(value), encoding="utf-8")
    os.replace(temporary, path)


def _read(path: Path) -> dict[str, Any]:
    try:
        return dict(read_json(path))
    except (OSError, ValueError, TypeError):
        return {}


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _is_plain(path: Path) -> bool:
    """Whether it is a file with one hard link, or was removed by another job in the meantime."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return True
    return stat.S_ISREG(status.st_mode) and status.st_nlink == 1


def _empty(folder: Path) -> None:
    """Removes the files of a folder and of its subfolders, if it exists; raises OSError if these contain folders."""
    if folder.exists():
        for path in folder.iterdir():
            if _is_folder(path):
                _remove_files(path)
                path.rmdir()
            else:
                path.unlink(missing_ok=True)


def _remove_files(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink(missing_ok=True)


def _remove(folder: Path) -> None:
    """Removes a folder of files, if it exists."""
    _empty(folder)
    with contextlib.suppress(FileNotFoundError):
        folder.rmdir()
