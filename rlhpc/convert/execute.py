"""Carrying out a plan: worker processes each take pieces, and the folder gets its name when all are there."""

from __future__ import annotations

import contextlib
import shutil
import signal
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

from rlhpc.checkpoint.formats.safetensors_headers import ITEM_BYTES
from rlhpc.checkpoint.formats.torch_dist import cut_box
from rlhpc.convert.arrays import NUMPY, Array, reuse_memory
from rlhpc.convert.destination import check_overlap, check_replaceable, is_replaceable, record_of
from rlhpc.convert.metadata import write_rest
from rlhpc.convert.plan import CHUNK_BYTES, ConversionPlan, NewChunk, NewTensor, Piece, check_disk
from rlhpc.convert.readers import Reader, check_tied, reader_of
from rlhpc.convert.staging import Items, Workshop
from rlhpc.convert.stream import Stream
from rlhpc.convert.torch_files import wrap
from rlhpc.core.errors import UserError
from rlhpc.core.overlap import resolved
from rlhpc.core.process import ProcessId, die_with
from rlhpc.sharding.shards import Box

Progress = Callable[[int, int], None]  # bytes written in this run, and of all that it has to write
_AGAIN = "run the same command again: what is finished is kept"


@dataclass(frozen=True)
class Share:
    """One of ``count`` equal parts of the pieces, to be done apart from the others."""

    index: int
    count: int


def convert(
    plan: ConversionPlan,
    target: Path,
    workers: int,
    force: bool = False,
    share: Share | None = None,
    progress: Progress = lambda done, total: None,
    notice: Callable[[str], None] = lambda text: None,
) -> bool:
    """Write the target folder, or one share of it; False if it was there already, made by the same plan.

    Raises UserError; what was finished until then is kept for the next try.
    """
    target = resolved(target)
    workshop = Workshop.beside(target)
    with _plainly(target):
        check_overlap(plan.source, target)
        if not force and is_done(plan, target):
            return False
        check_replaceable(target)
        workshop.check()
        if not workshop.path.exists():
            _check_disk(target, plan.pieces)
        with workshop.locked(f"{share.index}" if share else ""):
            if workshop.prepare(plan):
                notice("the source or the options have changed since the last try: starting afresh")
            todo = [piece for piece in plan.pieces if workshop.done(piece) is None]
            if share is not None:
                todo = [piece for piece in todo if piece.number % share.count == share.index]
            elif len(todo) < len(plan.pieces):
                notice(f"{len(plan.pieces) - len(todo)} of {len(plan.pieces)} pieces are there from before")
            _check_disk(target, todo)
            check_tied(plan.source)
            _do(plan, workshop, todo, workers, progress)
            if share is None:
                write_rest(plan, workshop)
                _publish(plan, workshop, target, force)
    return True


def _publish(plan: ConversionPlan, workshop: Workshop, target: Path, force: bool) -> None:
    """Give the result its name, unless something else has taken it since the beginning."""
    check_overlap(plan.source, target)
    if force:
        check_replaceable(target)
    else:
        _check_free(target)
    workshop.publish(target)


def _check_disk(target: Path, pieces: Sequence[Piece]) -> None:
    above = next(folder for folder in target.absolute().parents if folder.is_dir())
    check_disk(above, sum(piece.size for piece in pieces), shutil.disk_usage(above).free)


def is_done(plan: ConversionPlan, target: Path) -> bool:
    """The target was made by the same plan; a UserError if something else is in its place."""
    if _is_free(target):
        return False
    record = record_of(target)
    damaged = ""
    if record.get("digest") == plan.digest:
        if all((target / n).is_file() and (target / n).stat().st_size == s for n, s in record["files"].items()):
            return True
        damaged = ", and is damaged"
    raise _taken(target, damaged)


def _is_free(target: Path) -> bool:
    return not target.exists() or (target.is_dir() and not any(target.iterdir()))


def _check_free(target: Path) -> None:
    if not _is_free(target):
        raise _taken(target)


def _taken(target: Path, damaged: str = "") -> UserError:
    force = ", or replace it with --force" if is_replaceable(target) else ""
    return UserError(f"exists already{damaged}", where=str(target), remedy=f"choose another folder{force}")


@contextlib.contextmanager
def _plainly(target: Path) -> Iterator[None]:
    """What the file system or the machine refuses is one line for the user."""
    try:
        yield
    except BrokenProcessPool:
        message = "a worker process was killed, perhaps for want of memory"
        raise UserError(message, where=str(target), remedy=_AGAIN) from None
    except OSError as error:
        where = str(error.filename or target)
        raise UserError(error.strerror or str(error), where=where, remedy=_AGAIN) from error


def _do(plan: ConversionPlan, workshop: Workshop, todo: Sequence[Piece], workers: int, progress: Progress) -> None:
    total, written = sum(piece.size for piece in todo), 0
    progress(0, total)
    for piece in _work(plan, workshop, todo, min(workers, len(todo))):
        written += piece.size
        progress(written, total)


def _work(plan: ConversionPlan, workshop: Workshop, todo: Sequence[Piece], workers: int) -> Iterator[Piece]:
    """Each piece as it is finished."""
    if workers <= 1:
        reuse_memory()
        reader = reader_of(plan.source)
        for piece in todo:
            write_piece(reader, workshop, piece)
            yield piece
        return
    parent = ProcessId.own()
    # Forked, so that they start at once and share the plan; there is neither torch nor a thread in this process.
    pool = ProcessPoolExecutor(workers, get_context("fork"), initializer=_begin, initargs=(plan, workshop, parent))
    try:
        futures = {pool.submit(_take, index): piece for piece in todo for index in [plan.pieces.index(piece)]}
        for future in as_completed(futures):
            future.result()
            yield futures[future]
    finally:
        pool.shutdown(cancel_futures=True)


_state: tuple[ConversionPlan, Workshop, Reader] | None = None


def _begin(plan: ConversionPlan, workshop: Workshop, parent: ProcessId) -> None:
    global _state
    reuse_memory()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to answer
    die_with(parent)
    _state = plan, workshop, reader_of(plan.source)


def _take(index: int) -> None:
    assert _state is not None
    plan, workshop, reader = _state
    write_piece(reader, workshop, plan.pieces[index])


def write_piece(reader: Reader, workshop: Workshop, piece: Piece) -> None:
    """Write one piece, force it to disk, and note that it is there."""
    path = workshop.target / piece.file
    chunks = isinstance(piece.items[0], NewChunk)
    items: Items = []
    with Stream(path, truncate=chunks) as stream:
        for item in piece.items:
            if isinstance(item, NewChunk):
                items.append(_write_chunk(stream, reader, item))
            else:
                items.append(_write_tensor(stream, reader, item))
    workshop.finish(piece, items)


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
    """A slab of rows at a time."""
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
