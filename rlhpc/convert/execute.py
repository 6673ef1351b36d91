"""Executes a plan: worker processes write its files, and the folder gets its name when all are written."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from rlhpc.checkpoint.formats.arrays import NUMPY, Array
from rlhpc.checkpoint.formats.safetensors_headers import ITEM_BYTES
from rlhpc.checkpoint.formats.stream import Stream
from rlhpc.checkpoint.formats.torch_dist import cut_box
from rlhpc.convert.metadata import write_rest
from rlhpc.convert.plan import CHUNK_BYTES, ConversionPlan, NewChunk, NewTensor, Output, check_disk
from rlhpc.convert.pool import run_tasks
from rlhpc.convert.progress import SILENT, Progress
from rlhpc.convert.readers import Reader, check_tied, reader_of
from rlhpc.convert.sources import check_headers, check_sources
from rlhpc.convert.target import Partial, Places, check_overlap, check_replaceable, is_replaceable, record_of
from rlhpc.core.errors import UserError
from rlhpc.core.files import resolved
from rlhpc.sharding.shards import Box

_AGAIN = "run the same command again: finished files are kept"


def convert(
    plan: ConversionPlan, target: Path, workers: int, *, force: bool = False, progress: Progress = SILENT
) -> bool:
    """Writes the target folder; False if the same plan had already written it.

    Raises UserError; the finished files are kept for the next run.
    """
    target = resolved(target)
    partial = Partial(target)
    with _user_errors(plan, target):
        check_overlap(plan.source, target)
        if not force and is_done(plan, target):
            partial.tidy()
            return False
        check_replaceable(target)
        partial.check()
        above = next(folder for folder in target.parents if folder.is_dir())
        check_disk(above, plan.write_bytes - partial.size, shutil.disk_usage(above).free)
        target.parent.mkdir(parents=True, exist_ok=True)
        with partial.locked() as handle:
            partial.begin(plan, target, handle, force=force)
            _write_weights(plan, partial, workers, progress)
            write_rest(plan, partial)
            check_sources(plan.sources)
            check_overlap(plan.source, target)
            if force:
                check_replaceable(target)
            elif not _is_free(target):
                raise _taken(target)
            partial.publish(target, plan.names)
    return True


def _write_weights(plan: ConversionPlan, partial: Partial, workers: int, progress: Progress) -> None:
    outputs = [output for output in plan.outputs if not partial.is_finished(output)]
    if len(outputs) < len(plan.outputs):
        progress.note(f"{len(plan.outputs) - len(outputs)} of {len(plan.outputs)} files exist already")
    check_headers(plan.source)
    check_tied(plan.source)
    total, written = sum(output.size for output in outputs), 0
    progress.update(0, total)
    if plan.target == "megatron":
        import rlhpc.convert.torch_dist_files  # noqa: F401  # once, for all workers that are forked

    def prepare() -> Callable[[Output], None]:
        reader = reader_of(plan.source)
        return lambda output: _write_file(partial, reader, output)

    for index, _ in run_tasks(prepare, outputs, workers):
        written += outputs[index].size
        progress.update(written, total)


def _write_file(partial: Partial, reader: Reader, output: Output) -> None:
    places: Places = []
    with Stream(partial.part(output), truncate=True) as stream:
        stream.write(output.header)
        for item in output.items:
            if isinstance(item, NewChunk):
                from rlhpc.convert.torch_dist_files import save_chunk

                places.append(save_chunk(stream, reader, item))
            else:
                _write_tensor(stream, reader, item)
    partial.finish(output, places)


def _write_tensor(stream: Stream, reader: Reader, item: NewTensor) -> None:
    """Writes a slab of rows at a time."""
    shape = item.spec.shape
    for box in cut_box(Box((0,) * len(shape), shape), CHUNK_BYTES // ITEM_BYTES[item.dtype]):
        stream.write(_bytes_of(reader.tensor(item.spec.name, box, item.dtype)))


def _bytes_of(values: Array) -> memoryview:
    assert values.flags.c_contiguous
    assert values.dtype in NUMPY.values()
    return memoryview(values.reshape(-1)).cast("B") if values.size else memoryview(b"")


def is_done(plan: ConversionPlan, target: Path) -> bool:
    """True if the same plan has written the target; raises UserError if the path is taken by something else."""
    if _is_free(target):
        return False
    record = record_of(target)
    if record.get("digest") != plan.digest:
        raise _taken(target)
    if not all(
        (target / name).is_file() and (target / name).stat().st_size == size for name, size in record["files"].items()
    ):
        raise _taken(target, " and is damaged")
    return True


def _is_free(target: Path) -> bool:
    return not target.exists() or (target.is_dir() and not any(target.iterdir()))


def _taken(target: Path, damaged: str = "") -> UserError:
    force = ", or replace it with --force" if is_replaceable(target) else ""
    return UserError(f"already exists{damaged}", where=str(target), remedy=f"choose another folder{force}")


@contextlib.contextmanager
def _user_errors(plan: ConversionPlan, target: Path) -> Iterator[None]:
    """Turns errors of the file system into one line for the user."""
    try:
        yield
    except OSError as error:
        check_sources(plan.sources)  # a file of the source may be gone
        where = str(error.filename or target)
        raise UserError(error.strerror or str(error), where=where, remedy=_AGAIN) from error
