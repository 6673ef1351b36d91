"""Where a conversion is written until it is whole: a hidden folder beside the target.

.NAME.converting/plan.json    which plan the pieces are of
                 pieces/7.json  written when piece 7 is on disk: where its items lie, and their CRC-32
                 target/      what will be the target
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhpc.core.errors import UserError
from rlhpc.core.files import read_json
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
        known = _read(note).get("digest") if note.is_file() else None
        other = known is not None and known != plan.digest
        if known != plan.digest:
            for folder in (self.target, self.pieces):
                shutil.rmtree(folder, ignore_errors=True)
        self.pieces.mkdir(exist_ok=True)
        self.target.mkdir(exist_ok=True)
        for file in plan.files:
            with open(self.target / file.name, "ab") as handle:
                handle.truncate(file.size)
        _write(note, {"digest": plan.digest})
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
            former = self.path / "former"
            shutil.rmtree(former, ignore_errors=True)
            os.replace(target, former)
        os.replace(self.target, target)
        flush(target.absolute().parent)
        shutil.rmtree(self.path, ignore_errors=True)


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
