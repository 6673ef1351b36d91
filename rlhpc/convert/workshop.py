"""Where a conversion is written until it is whole: a hidden folder beside the target.

.NAME.converting/plan.json    which plan the pieces are of
                 pieces/7.json  written when piece 7 is on disk: where its items lie, and their CRC-32
                 target/      what will be the target
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rlhpc.core.errors import UserError
from rlhpc.core.files import read_json, write_json
from rlhpc.plan.convert import ConversionPlan, Piece

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

    def prepare(self, plan: ConversionPlan) -> bool:
        """Make the folders; what is there of another plan goes. Returns whether there was any."""
        note = self.path / "plan.json"
        known = read_json(note)["digest"] if note.is_file() else None
        other = known is not None and known != plan.digest
        if known != plan.digest:
            for folder in (self.target, self.pieces):
                shutil.rmtree(folder, ignore_errors=True)
        self.pieces.mkdir(exist_ok=True)
        self.target.mkdir(exist_ok=True)
        for file in plan.files:
            with open(self.target / file.name, "ab") as handle:
                handle.truncate(file.size)
        write_json(note, {"digest": plan.digest})
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
        try:
            found: Items = read_json(self.pieces / f"{piece.number}.json")["items"]
        except (OSError, ValueError, KeyError):
            return None
        return found if (self.target / piece.file).is_file() else None

    def finish(self, piece: Piece, items: Items) -> None:
        """Note that a piece is on disk."""
        write_json(self.pieces / f"{piece.number}.json", {"items": items})

    def publish(self, target: Path) -> None:
        """Give what is written its name, in the place of what had it."""
        for file in self.target.iterdir():
            flush(file)
        flush(self.target)
        if target.exists():
            former = self.path / "former"
            shutil.rmtree(former, ignore_errors=True)
            os.replace(target, former)
        os.replace(self.target, target)
        flush(target.absolute().parent)
        shutil.rmtree(self.path, ignore_errors=True)


def flush(path: Path) -> None:
    """Force a file or folder to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
