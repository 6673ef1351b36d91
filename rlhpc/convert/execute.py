"""Executes a plan: worker processes write its pieces, and the folder gets its name when all are written."""

from __future__ import annotations

import contextlib
import errno
import shutil
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlhpc.checkpoint.formats.arrays import NUMPY, Array, take_read_files, timed, timed_seconds
from rlhpc.checkpoint.formats.safetensors_headers import ITEM_BYTES
from rlhpc.checkpoint.formats.stream import Stream
from rlhpc.checkpoint.formats.torch_dist import cut_box
from rlhpc.convert.metadata import write_rest
from rlhpc.convert.outputs import ConversionJob, Output, outputs_of, reads_back
from rlhpc.convert.plan import CHUNK_BYTES, ConversionPlan, NewChunk, NewTensor, Piece, check_disk
from rlhpc.convert.pool import WorkerKilled, run_tasks
from rlhpc.convert.progress import SILENT, Progress
from rlhpc.convert.readers import Reader, check_tied, reader_of
from rlhpc.convert.sources import check_headers
from rlhpc.convert.staging import (
    SEEN_SECONDS,
    Items,
    Staging,
    check_overlap,
    check_replaceable,
    is_replaceable,
    locked,
    make_folder,
    record_of,
)
from rlhpc.convert.torch_files import wrap
from rlhpc.core.errors import UserError
from rlhpc.core.files import resolved
from rlhpc.sharding.shards import Box

_AGAIN = "run the same command again: finished pieces are kept"
_MOVED = (errno.ENOENT, errno.ESTALE, errno.ENOTEMPTY, errno.EEXIST)  # by another process
_TRIES = 3


@dataclass(frozen=True)
class Share:
    """One of ``count`` parts of the files, written by a job of its own."""

    index: int
    count: int

    @property
    def name(self) -> str:
        return f"{self.index}of{self.count}"

    def of(self, outputs: Sequence[Output]) -> list[Output]:
        """Its files among these. A file is written by one process, as bytes of two nodes may not mix in a page."""
        return [output for number, output in enumerate(outputs) if number % self.count == self.index]


@dataclass(frozen=True)
class _Request:
    """Arguments of a conversion."""

    plan: ConversionPlan
    target: Path
    workers: int
    force: bool
    share: Share | None
    progress: Progress


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
    staging, before = Staging.beside(target), _identity(target)
    with _user_errors(target):
        check_overlap(plan.source, target)
        if not force and is_done(plan, target):
            staging.tidy(plan)
            return False
        check_replaceable(target)
        staging.check()
        if not staging.path.exists():
            _check_room(target, sum(piece.size for piece in plan.pieces))
        target.parent.mkdir(parents=True, exist_ok=True)
        return _convert_among_others(_Request(plan, target, workers, force, share, progress), before)


def _convert_among_others(request: _Request, before: int | None) -> bool:
    """Converts; again if another process has moved files away, unless the target is no longer the one of ``before`` but
    the same result."""
    plan, target, share = request.plan, request.target, request.share
    staging = Staging.beside(target)
    for left in reversed(range(_TRIES)):
        try:
            make_folder(staging.path)
            with locked(staging.path, str(share.index) if share else ""):
                _convert(request)
            break
        except (OSError, UserError) as error:
            if isinstance(error, OSError):
                plan.sources.check()  # a file of the source may be gone
            moved = isinstance(error, OSError) and error.errno in _MOVED
            moved = moved and str(error.filename or staging.path).startswith((str(staging.path), str(target)))
            if _was_published(plan, target, before, SEEN_SECONDS if moved else 0.0):
                staging.discard(plan)
                return share is not None
            if not (moved and left):
                raise
    if share is None:
        staging.discard(plan)
    return True


def _convert(request: _Request) -> None:
    plan, target, share, progress = request.plan, request.target, request.share, request.progress
    staging, name = Staging.beside(target), share.name if share else None
    path, restarted = staging.begin(plan, name)
    job, outputs = ConversionJob(staging.of(plan), path, name), outputs_of(plan)
    try:
        if restarted:
            progress.note("the source or the options have changed since the last run: starting over")
        if share is not None:
            outputs = share.of(outputs)
        job.adopt(outputs)
        if share is None:
            ready = _found(job, outputs, request.workers, progress)
        else:  # the run that completes the folder reads them back
            ready = {number: items for output in outputs for number, items in job.written(output).items()}
        _check_room(target, job.needed(outputs, ready))
        items = _write(plan, job, outputs, ready, request.workers, progress)
        if share is None:
            with timed("finish"):
                names = write_rest(plan, job.rest, items)
                job.finish_rest()
                _publish(plan, job, target, names, force=request.force)
            progress.spent(timed_seconds())
    finally:
        job.end()


def _found(job: ConversionJob, outputs: Sequence[Output], workers: int, progress: Progress) -> dict[int, Items]:
    """Items of the pieces that exist already, by number; damaged ones are left out. Reads them back from disk: nothing
    else shows that what other processes wrote is there."""
    written = {output.file: job.written(output) for output in outputs}
    tasks = [(output, piece) for output in outputs for piece in output.pieces if piece.number in written[output.file]]
    if tasks:
        progress.note(f"{len(tasks)} of {sum(len(output.pieces) for output in outputs)} pieces exist already")

    def prepare() -> Callable[[tuple[Output, Piece]], bool]:
        return lambda task: reads_back(job.place(task[0]), *task, written[task[0].file][task[1].number])

    damaged = [tasks[index] for index, good in run_tasks(prepare, tasks, workers) if not good]
    if damaged:
        progress.note(f"{len(damaged)} of them are damaged and are written again")
    for output, piece in damaged:
        if job.part(output).exists():
            del written[output.file][piece.number]
        else:
            written[output.file] = {}
    return {number: items for found in written.values() for number, items in found.items()}


def _write(
    plan: ConversionPlan,
    job: ConversionJob,
    outputs: Sequence[Output],
    ready: dict[int, Items],
    workers: int,
    progress: Progress,
) -> dict[int, Items]:
    """Writes the other pieces, and moves each file to its place when it is complete; items of all pieces."""
    items, by_file = dict(ready), {output.file: output for output in outputs}
    left = {output.file: {piece.number for piece in output.pieces} - ready.keys() for output in outputs}
    pieces = [piece for output in outputs for piece in output.pieces if piece.number not in ready]
    total, written = sum(piece.size for piece in pieces), 0
    check_headers(plan.source)
    check_tied(plan.source)
    for output in outputs:
        if left[output.file]:
            job.begin(output)
        elif job.part(output).exists():
            job.finish(output)
    progress.update(0, total)

    def prepare() -> Callable[[Piece], tuple[Items, dict[str, float]]]:
        reader = reader_of(plan.source, checked=True)
        return lambda piece: (write_piece(plan, reader, job, job.part(by_file[piece.file]), piece), timed_seconds())

    for index, (found, parts) in run_tasks(prepare, pieces, workers):
        progress.spent(parts)
        piece = pieces[index]
        items[piece.number] = found
        left[piece.file].remove(piece.number)
        if not left[piece.file]:
            job.finish(by_file[piece.file])
        written += piece.size
        progress.update(written, total)
    return items


def _publish(plan: ConversionPlan, job: ConversionJob, target: Path, names: Sequence[str], *, force: bool) -> None:
    """Gives the result its name, unless something else has taken it in the meantime."""
    plan.sources.check()
    check_overlap(plan.source, target)
    if force:
        check_replaceable(target)
    else:
        _check_free(target)
    job.publish(target, names)


def _was_published(plan: ConversionPlan, target: Path, before: int | None, seconds: float) -> bool:
    """True if another process has published the plan's result since the target was ``before``; waits until it is seen
    here."""
    deadline = time.monotonic() + seconds
    while True:
        if _identity(target) != before and _is_result(plan, target):
            return True
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.1)


def _identity(target: Path) -> int | None:
    try:
        return target.stat().st_ino
    except OSError:
        return None


def _check_room(target: Path, needed: int) -> None:
    above = next(folder for folder in target.absolute().parents if folder.is_dir())
    check_disk(above, needed, shutil.disk_usage(above).free)


def is_done(plan: ConversionPlan, target: Path) -> bool:
    """True if the same plan has written the target; raises UserError if the path is taken by something else."""
    if _is_free(target):
        return False
    if _is_result(plan, target):
        return True
    raise _taken(target, " and is damaged" if record_of(target).get("digest") == plan.digest else "")


def _is_result(plan: ConversionPlan, target: Path) -> bool:
    """True if the target is complete and of the same plan."""
    record = record_of(target)
    return record.get("digest") == plan.digest and all(
        (target / name).is_file() and (target / name).stat().st_size == size for name, size in record["files"].items()
    )


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


def write_piece(plan: ConversionPlan, reader: Reader, job: ConversionJob, part: Path, piece: Piece) -> Items:
    """Writes one piece into a file, flushes it to disk, and records it if the files that were read have not changed."""
    chunks = isinstance(piece.items[0], NewChunk)
    items: Items = []
    with timed("write"), Stream(part, truncate=chunks) as stream:
        for item in piece.items:
            if isinstance(item, NewChunk):
                items.append(_write_chunk(stream, reader, item))
            else:
                items.append(_write_tensor(stream, reader, item))
    plan.sources.check(take_read_files())
    job.record(piece, items)
    return items


def _write_chunk(stream: Stream, reader: Reader, item: NewChunk) -> list[int]:
    with timed("read"):
        values = reader.chunk(item)
    shape = item.parameter.in_key(item.box).shape
    data = _bytes_of(values)
    with timed("checksum"):
        checksum = zlib.crc32(data)
    head, tail = wrap(item.dtype, shape, checksum)
    start = stream.at
    for block in (head, data, tail):
        stream.write(block)
    return [start, stream.at - start, checksum]


def _write_tensor(stream: Stream, reader: Reader, item: NewTensor) -> list[int]:
    """Writes a slab of rows at a time."""
    checksum = 0
    stream.seek(item.start)
    shape = item.spec.shape
    for box in cut_box(Box((0,) * len(shape), shape), CHUNK_BYTES // ITEM_BYTES[item.dtype]):
        with timed("read"):
            data = _bytes_of(reader.tensor(item.spec.name, box, item.dtype))
        with timed("checksum"):
            checksum = zlib.crc32(data, checksum)
        stream.write(data)
    assert stream.at - item.start == item.size
    return [item.start, item.size, checksum]


def _bytes_of(values: Array) -> memoryview:
    assert values.flags.c_contiguous
    assert values.dtype in NUMPY.values()
    return memoryview(values.reshape(-1)).cast("B") if values.size else memoryview(b"")
