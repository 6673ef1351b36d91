"""Checks of source files: unchanged since the conversion was planned."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rlhpc.checkpoint.formats.megatron_folder import TRACKER
from rlhpc.checkpoint.formats.model_files import RECORD, model_files
from rlhpc.checkpoint.formats.safetensors_headers import INDEX, read_folder
from rlhpc.checkpoint.formats.torch_dist_metadata import COMMON, TABLE
from rlhpc.convert.sides import HuggingFaceSide, MegatronSide, Side
from rlhpc.core.errors import UserError

_INDEXES = (".metadata", "metadata.json", COMMON, TABLE, INDEX, RECORD, TRACKER)


@dataclass(frozen=True)
class SourceFile:
    """A file of weights or an index, as it was when the conversion was planned."""

    path: Path
    size: int
    mtime_ns: int
    inode: int

    @classmethod
    def of(cls, path: Path) -> SourceFile:
        """The file as it is now. It is opened, since over NFS a name alone has attributes that are seconds old."""
        descriptor = os.open(path, os.O_RDONLY)
        try:
            status = os.fstat(descriptor)
        finally:
            os.close(descriptor)
        return cls(path, status.st_size, status.st_mtime_ns, status.st_ino)

    def check(self) -> None:
        """Raises UserError if it has changed."""
        try:
            now = SourceFile.of(self.path)
        except FileNotFoundError:
            now = None
        if now != self:
            raise source_changed(self.path)


@dataclass(frozen=True)
class Sources:
    """Files of weights and indexes, and the SHA-256 of each file that is copied."""

    files: tuple[SourceFile, ...]
    copied: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, side: Side) -> Sources:
        """The side's files as they are now."""
        places = (folder / name for folder in {side.home, side.folder} for name in _INDEXES)
        indexes = {path for path in places if path.is_file()}
        copied = ((file.name, digest_of(file)) for file in model_files(side.model_folder))
        return cls(tuple(map(SourceFile.of, sorted({*_weights(side), *indexes}))), tuple(copied))

    def check(self, paths: Iterable[Path] | None = None) -> None:
        """Checks these files, by default all. Raises UserError for one that has changed."""
        wanted = None if paths is None else set(paths)
        for file in self.files:
            if wanted is None or file.path in wanted:
                file.check()


def check_headers(side: Side) -> None:
    """Checks that the headers are those that the conversion was planned with: they were read before the files' times
    were. Raises UserError."""
    if isinstance(side, HuggingFaceSide):
        known = {**side.tensors, **side.scales, **side.left_out}
        now = read_folder(side.folder)
        if now != known:
            other = next(name for name in {**known, **now} if known.get(name) != now.get(name))
            raise source_changed((known.get(other) or now[other]).file)


def source_changed(path: Path) -> UserError:
    """The error for a file that has changed."""
    return UserError(
        "has changed since the conversion began: nothing was published",
        where=str(path),
        remedy="run the same command again when nothing writes to it; the conversion then starts over",
    )


def digest_of(file: Path) -> str:
    """SHA-256 of a file."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _weights(side: Side) -> Iterator[Path]:
    yield from side.files
    if isinstance(side, HuggingFaceSide):
        yield from (tensor.file for tensor in (*side.scales.values(), *side.left_out.values()))
    if isinstance(side, MegatronSide):
        yield from (side.folder / file for file, _, _ in side.objects.values())
