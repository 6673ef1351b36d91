"""Executes a plan: worker processes write its pieces, and the folder gets its name when all are written."""

from __future__ import annotations

import contextlib
import functools
import shutil
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlhpc.checkpoint.formats.arrays import NUMPY, Array
from rlhpc.checkpoint.formats.safetensors_headers import ITEM_BYTES
from rlhpc.checkpoint.formats.stream import Stream
from rlhpc.checkpoint.formats.torch_dist import cut_box
from rlhpc.convert.destination import check_overlap, check_replaceable, is_replaceable, record_of
from rlhpc.convert.metadata import write_rest
from rlhpc.convert.plan import CHUNK_BYTES, ConversionPlan, NewChunk, NewTensor, Piece, check_disk
from rlhpc.convert.pool import WorkerKilled, run_tasks
from rlhpc.convert.progress import SILENT, Progress
from rlhpc.convert.readers import Reader, check_tied, reader_of
from rlhpc.convert.staging import Items, Staging
from rlhpc.convert.torch_files import wrap
from rlhpc.core.errors import UserError
from rlhpc.core.overlap import resolved
from rlhpc.sharding.shards import Box

_AGAIN = "run the same command again: finished pieces are kept"


@dataclass(frozen=True)
class Share:
    """One of ``count`` equal parts of the pieces, written by a job of its own."""

    index: int
    count: int

    def of(self, pieces: Sequence[Piece]) -> list[Piece]:
        """Its pieces among these."""
        return [piece for piece in pieces if piece.number % self.count == self.index]


def convert(
    plan: ConversionPlan,
    target: Path,
    workers: int,
    *,
    force: bool = False,
    share: Share | None = None,
    progress: Progress = SILENT,
) -> bool:
    """Writes the target folder, or one share of it; False if the same plan had already written it.

    Raises UserError; the finished pieces are kept for the next run.
    """
    target = resolved(target)
    staging = Staging.beside(target)
    with _user_errors(target):
        check_overlap(plan.source, target)
        if not force and is_done(plan, target):
            return False
        check_replaceable(target)
        staging.check()
        if not staging.path.exists():
            _check_disk(target, plan.pieces)
        with staging.locked(f"{share.index}" if share else ""):
            if staging.prepare(plan):
                progress.note("the source or the options have changed since the last run: starting over")
            left = [piece for piece in plan.pieces if staging.items_of(piece) is None]
            if share is not None:
                left = share.of(left)
            elif len(left) < len(plan.pieces):
                progress.note(f"{len(plan.pieces) - len(left)} of {len(plan.pieces)} pieces exist already")
            _check_disk(target, left)
            check_tied(plan.source)
            _write_pieces(plan, staging, left, workers, progress)
            if share is None:
                write_rest(plan, staging)
                _publish(plan, staging, target, force=force)
    return True


def _publish(plan: ConversionPlan, staging: Staging, target: Path, *, force: bool) -> None:
    """Gives the result its name, unless something else has taken it in the meantime."""
    check_overlap(plan.source, target)
    if force:
        check_replaceable(target)
    else:
        _check_free(target)
    staging.publish(target)


def _check_disk(target: Path, pieces: Sequence[Piece]) -> None:
    above = next(folder for folder in target.absolute().parents if folder.is_dir())
    check_disk(above, sum(piece.size for piece in pieces), shutil.disk_usage(above).free)


def is_done(plan: ConversionPlan, target: Path) -> bool:
    """Whether the same plan has written the target; raises UserError if the path is taken by something else."""
    if _is_free(target):
        return False
    record = record_of(target)
    damaged = ""
    if record.get("digest") == plan.digest:
        if all((target / n).is_file() and (target / n).stat().st_size == s for n, s in record["files"].items()):
            return True
        damaged = " and is damaged"
    raise _taken(target, damaged)


def _is_free(target: Path) -> bool:
    return not target.exists() or (target.is_dir() and not any(target.iterdir()))


def _check_free(target: Path) -> None:
    if not _is_free(target):
        raise _taken(target)


def _taken(target: Path, damaged: str = "") -> UserError:
    force = ", or replace it with --force" if is_replaceable(target) else ""
    return UserError(f"already exists{damaged}", where=str(target), remedy=f"choose another folder{force}")


@contextlib.contextmanager
def _user_errors(target: Path) -> Iterator[None]:
    """Turns errors of the file system, and killed workers, into one line for the user."""
    try:
        yield
    except WorkerKilled:
        message = "a worker process was killed, perhaps because memory ran out"
        raise UserError(message, where=str(target), remedy=_AGAIN) from None
    except OSError as error:
        where = str(error.filename or target)
        raise UserError(error.strerror or str(error), where=where, remedy=_AGAIN) from error


def _write_pieces(
    plan: ConversionPlan, staging: Staging, pieces: Sequence[Piece], workers: int, progress: Progress
) -> None:
    total, written = sum(piece.size for piece in pieces), 0
    progress.update(0, total)

    def prepare() -> Callable[[Piece], None]:
        return functools.partial(write_piece, reader_of(plan.source), staging)

    for index, _ in run_tasks(prepare, pieces, workers):
        written += pieces[index].size
        progress.update(written, total)


def write_piece(reader: Reader, staging: Staging, piece: Piece) -> None:
    """Writes one piece, flushes it to disk, and records it."""
    path = staging.target / piece.file
    chunks = isinstance(piece.items[0], NewChunk)
    items: Items = []
    with Stream(path, truncate=chunks) as stream:
        for item in piece.items:
            if isinstance(item, NewChunk):
                items.append(_write_chunk(stream, reader, item))
            else:
                items.append(_write_tensor(stream, reader, item))
    staging.record(piece, items)


def _write_chunk(stream: Stream, reader: Reader, item: NewChunk) -> list[int]:
    values = reader.chunk(item)
    shape = item.parameter.in_key(item.box).shape
    data = _bytes_of(values)
    checksum = zlib.crc32(data)
    head, tail = wrap(item.dtype, shape, checksum)
    start = stream.at
    for part in (head, data, tail):
        stream.write(part)
    return [start, stream.at - start, checksum]


def _write_tensor(stream: Stream, reader: Reader, item: NewTensor) -> list[int]:
    """Writes a slab of rows at a time."""
    checksum = 0
    stream.seek(item.start)
    shape = item.spec.shape
    for box in cut_box(Box((0,) * len(shape), shape), CHUNK_BYTES // ITEM_BYTES[item.dtype]):
        data = _bytes_of(reader.tensor(item.spec.name, box, item.dtype))
        checksum = zlib.crc32(data, checksum)
        stream.write(data)
    assert stream.at - item.start == item.size
    return [item.start, item.size, checksum]


def _bytes_of(values: Array) -> memoryview:
    assert values.flags.c_contiguous
    assert values.dtype in NUMPY.values()
    return memoryview(values.reshape(-1)).cast("B") if values.size else memoryview(b"")
