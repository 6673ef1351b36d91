"""Checks of source files: unchanged since the conversion was planned."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from rlhpc.checkpoint.formats.megatron_folder import TRACKER
from rlhpc.checkpoint.formats.model_files import RECORD, model_files
from rlhpc.checkpoint.formats.safetensors_headers import INDEX, read_folder
from rlhpc.checkpoint.formats.torch_dist_metadata import COMMON, TABLE
from rlhpc.convert.sides import HuggingFaceSide, MegatronSide, Side
from rlhpc.core.errors import UserError

_INDEXES = (".metadata", "metadata.json", COMMON, TABLE, INDEX, RECORD, TRACKER)


FileState = tuple[Path, int, int, int]  # size, time of modification and inode of a file


def _state_of(path: Path) -> FileState:
    status = path.stat()
    return path, status.st_size, status.st_mtime_ns, status.st_ino


def sources_of(side: Side) -> tuple[FileState, ...]:
    """The side's files as they are now."""
    places = (folder / name for folder in {side.home, side.folder} for name in _INDEXES)
    indexes = {path for path in places if path.is_file()}
    return tuple(map(_state_of, sorted({*_weights(side), *indexes, *model_files(side.model_folder)})))


def check_sources(files: Iterable[FileState]) -> None:
    """Raises UserError for a file that has changed."""
    for file in files:
        if not file[0].is_file() or _state_of(file[0]) != file:
            raise source_changed(file[0])


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
        remedy="run the command with --force when nothing writes to it: the conversion starts over",
    )


def digest_of(file: Path) -> str:
    """SHA-256 of a file."""
    with open(file, "rb", buffering=0) as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _weights(side: Side) -> Iterator[Path]:
    yield from side.files
    if isinstance(side, HuggingFaceSide):
        yield from (tensor.file for tensor in (*side.scales.values(), *side.left_out.values()))
    if isinstance(side, MegatronSide):
        yield from (side.folder / file for file, _, _ in side.objects.values())
