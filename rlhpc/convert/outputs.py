"""Files of weights while a conversion writes them: in a process's own folder, then in the future target."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from rlhpc.checkpoint.formats.safetensors_headers import NewFile
from rlhpc.convert.metadata import crc_of
from rlhpc.convert.plan import ConversionPlan, NewChunk, Piece
from rlhpc.convert.staging import (
    ENDED,
    FORMER,
    Items,
    PlanFolder,
    check_replaceable,
    files_below,
    has_ended,
    is_plain,
    make_folder,
    share_of,
)
from rlhpc.convert.torch_files import wrap
from rlhpc.core.errors import UserError
from rlhpc.core.files import flush, read_json, rename


@dataclass(frozen=True)
class Output:
    """A file of the target with its pieces. ``header``: that of a safetensors file."""

    file: str
    pieces: tuple[Piece, ...]
    header: bytes
    size: int | None

    @property
    def part(self) -> str:
        """Its name while it is incomplete."""
        return f"{self.pieces[0].number}.part"


def outputs_of(plan: ConversionPlan) -> list[Output]:
    """Files of weights, in the plan's order."""
    found: dict[str, list[Piece]] = {}
    for piece in plan.pieces:
        found.setdefault(piece.file, []).append(piece)
    new: dict[str, NewFile] = {file.name: file for file in plan.files}
    return [
        Output(file, tuple(pieces), new[file].header if file in new else b"", new[file].size if file in new else None)
        for file, pieces in found.items()
    ]


class ConversionJob:
    """This process's work on a plan. ``path``: its own folder; ``share``: its part of the plan, None for all of it."""

    def __init__(self, folder: PlanFolder, path: Path, share: str | None = None) -> None:
        self._folder, self._path, self._share = folder, path, share

    @cached_property
    def rest(self) -> Path:
        """Folder for the files besides weights, before they are moved to the target."""
        path = self._path / "rest"
        make_folder(path)
        return path

    @property
    def former(self) -> Path:
        return self._path / FORMER

    def part(self, output: Output) -> Path:
        """Path of a file that is being written."""
        return self._path / output.part

    def adopt(self, outputs: Sequence[Output]) -> None:
        """Takes over the files of processes that have certainly ended; as a share, only those of the same share."""
        for name in sorted(os.listdir(self._folder.jobs)):
            if has_ended(name) and (self._share in (None, share_of(name))):
                mine = self._path / f"from-{name}"
                with contextlib.suppress(FileNotFoundError):  # another process was faster
                    os.rename(self._folder.jobs / name, mine)
                    self._take(mine, outputs)

    def _take(self, ended: Path, outputs: Sequence[Output]) -> None:
        """Takes what an ended process has written, or had itself taken from others when it was killed."""
        folders = [ended, *sorted(path for path in ended.rglob("from-*") if path.is_dir())]
        for output in outputs:
            part, done = _found_in(folders, output.part), self._folder.target / output.file
            found = [_found_in(folders, f"{piece.number}.json") for piece in output.pieces]
            records = [path for path in found if path is not None]
            if records and part is not None and is_plain(part) and not self.part(output).exists():
                rename(part, self.part(output))
                for record in records:
                    rename(record, self._path / record.name)
            elif part is None and done.is_file() and self._all_recorded(output, records):
                for record in records:  # it was about to do so
                    rename(record, self._folder.pieces / record.name)
        for suffix in (".json", ".tmp", ".part"):  # never a record without its file
            for path in (path for folder in folders for path in folder.iterdir() if path.suffix == suffix):
                path.unlink()
        with contextlib.suppress(OSError):  # more than that: removed with the plan
            for folder in reversed(folders):
                folder.rmdir()

    def _all_recorded(self, output: Output, records: Sequence[Path]) -> bool:
        """True if each piece of a file has one of these records, or one that was moved with the file."""
        names = {record.name for record in records}
        return all(
            (name := f"{piece.number}.json") in names or (self._folder.pieces / name).is_file()
            for piece in output.pieces
        )

    def written(self, output: Output) -> dict[int, Items]:
        """Items of the finished pieces of a file, by number: all of a complete file, or those taken over."""
        complete = _items_in(self._folder.pieces, output.pieces)
        if len(complete) == len(output.pieces) and _has_size(self._folder.target / output.file, output, complete):
            return complete
        taken = _items_in(self._path, output.pieces)
        return taken if taken and _has_size(self.part(output), output, taken) else {}

    def place(self, output: Output) -> Path:
        """Place of the finished pieces of a file."""
        return part if (part := self.part(output)).exists() else self._folder.target / output.file

    def begin(self, output: Output) -> None:
        """Prepares a file of several pieces."""
        if output.size is not None:
            descriptor = os.open(self.part(output), os.O_WRONLY | os.O_CREAT, 0o666)
            os.ftruncate(descriptor, output.size)
            os.close(descriptor)

    def record(self, piece: Piece, items: Items) -> None:
        """Records that a piece is on disk, without fsync: one whose record a crash of the machine loses is repeated."""
        temporary = self._path / f"{piece.number}.{os.getpid()}.tmp"
        temporary.write_text(json.dumps({"items": items}), encoding="utf-8")
        os.replace(temporary, self._path / f"{piece.number}.json")

    def finish(self, output: Output) -> None:
        """Moves a complete file to the target."""
        part, file = self.part(output), self._folder.target / output.file
        if output.header:
            _write_header(part, output.header)
        make_folder(file.parent)
        rename(part, file)
        for piece in output.pieces:
            rename(self._path / f"{piece.number}.json", self._folder.pieces / f"{piece.number}.json")

    def finish_rest(self) -> None:
        """Moves the files besides weights to the target."""
        for path in sorted(self.rest.rglob("*")):
            if path.is_file():
                file = self._folder.target / path.relative_to(self.rest)
                make_folder(file.parent)
                rename(path, file)

    def publish(self, target: Path, names: Sequence[str]) -> None:
        """Renames the result, which must have these files and no others, to the target, and sets aside what had that
        name. Raises UserError if that is not what a conversion wrote."""
        result = self._folder.target
        _check_files(result, names)
        for folder in sorted({(result / name).parent for name in names}, reverse=True):
            flush(folder)
        if os.path.lexists(target) and os.listdir(target):
            os.rename(target, self.former)
            try:
                check_replaceable(self.former)
            except UserError:
                os.rename(self.former, target)
                raise
        os.rename(result, target)
        flush(target.parent)
        _check_files(target, names)

    def needed(self, outputs: Sequence[Output], ready: Mapping[int, Items]) -> int:
        """Bytes that the pieces which are not ``ready`` still need on disk."""
        total = 0
        for output in outputs:
            left = sum(piece.size for piece in output.pieces if piece.number not in ready)
            done = sum(piece.size for piece in output.pieces if piece.number in ready)
            part = self.part(output)
            begun = part.stat().st_blocks * 512 - done if part.exists() else 0  # of an unfinished piece
            total += max(0, left - max(0, begun))
        return total

    def end(self) -> None:
        """Says that this process will not touch its folder again, unless the folder is gone."""
        with contextlib.suppress(OSError):
            os.rename(self._path, self._path.with_name(self._path.name + ENDED))


def _found_in(folders: Sequence[Path], name: str) -> Path | None:
    return next((path for folder in folders if (path := folder / name).is_file()), None)


def _check_files(folder: Path, names: Sequence[str]) -> None:
    """Checks that these files are all that is in a folder. Raises FileNotFoundError, or UserError for others."""
    if missing := [name for name in names if not (folder / name).is_file()]:
        raise FileNotFoundError(errno.ENOENT, "is missing in the result", str(folder / missing[0]))
    present = {name for name in files_below(folder) if not Path(name).name.startswith(".nfs")}
    if extra := sorted(present - set(names)):
        raise UserError(
            f"{extra[0]!r} in it was not written by this conversion", where=str(folder), remedy="move it away"
        )


def _write_header(part: Path, header: bytes) -> None:
    descriptor = os.open(part, os.O_WRONLY)
    try:
        os.pwrite(descriptor, header, 0)
        os.fdatasync(descriptor)
    finally:
        os.close(descriptor)


def _items_in(folder: Path, pieces: tuple[Piece, ...]) -> dict[int, Items]:
    found = {piece.number: _read(folder / f"{piece.number}.json").get("items") for piece in pieces}
    return {piece.number: items for piece in pieces if _fit(piece, items := found[piece.number])}


def _read(path: Path) -> dict[str, Any]:
    try:
        return dict(read_json(path))
    except (OSError, ValueError, TypeError):
        return {}


# --- against the plan


def _fit(piece: Piece, items: Any) -> bool:
    """True if a record has a place for each of the piece's items, as the plan requires."""
    try:
        return [place[:2] for place in items] == list(_places(piece, [crc for _, _, crc in items]))
    except (TypeError, ValueError, LookupError):
        return False


def _places(piece: Piece, checksums: list[int]) -> Iterator[list[int]]:
    """Start and length of each item in its file."""
    at = 0
    for item, checksum in zip(piece.items, checksums, strict=True):
        if isinstance(item, NewChunk):
            length = item.size + sum(map(len, ends_of(item, checksum)))
            yield [at, length]
            at += length
        else:
            yield [item.start, item.size]


def ends_of(item: NewChunk, checksum: int) -> tuple[bytes, bytes]:
    """Bytes before and after the elements of a chunk."""
    return wrap(item.dtype, item.parameter.in_key(item.box).shape, checksum)


def _has_size(file: Path, output: Output, items: dict[int, Items]) -> bool:
    """True if the file exists and has the planned size."""
    size = output.size
    if size is None:
        start, length, _ = items[output.pieces[-1].number][-1]  # of the only piece
        size = start + length
    return file.is_file() and file.stat().st_size == size


def reads_back(path: Path, output: Output, piece: Piece, items: Items) -> bool:
    """True if a finished piece is on disk as it was written, byte by byte; also the header of a complete file."""
    with open(path, "rb") as file:
        for item, (start, length, checksum) in zip(piece.items, items, strict=True):
            head, tail = ends_of(item, checksum) if isinstance(item, NewChunk) else (b"", b"")
            file.seek(start)
            if file.read(len(head)) != head:
                return False
            file.seek(start + length - len(tail))
            if file.read(len(tail)) != tail:
                return False
            if crc_of(path, start + len(head), item.size) != checksum:
                return False
        file.seek(0)
        return path.suffix == ".part" or file.read(len(output.header)) == output.header
