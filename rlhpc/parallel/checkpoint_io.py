"""Writes and reads the files of checkpoints.

Files are written again after a file system has failed (rlhpc.core.storage). Values besides tensors are read without
running code from them (rlhpc.checkpoint.formats).
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from rlhpc.checkpoint.formats.torch_archive import Values, read_bytes, read_file
from rlhpc.checkpoint.formats.torch_dist_metadata import COMMON, TORCH_DTYPES, Index, parse_index
from rlhpc.core.errors import UserError
from rlhpc.core.storage import os_error_in, patiently
from rlhpc.parallel import pinned_memory

Buckets = list[tuple[Any, str, tuple[list[Any], list[Any]]]]  # file, key, (bytes, tensors), each with its item


def write_archive(file: Path, value: Any) -> None:
    """Writes with torch.save and flushes to disk; raises the file system's OSError, which torch.save hides."""
    try:
        with open(file, "wb") as stream:
            torch.save(value, stream)
            stream.flush()
            os.fsync(stream.fileno())
    except RuntimeError as error:
        found = os_error_in(error)
        if found is None:
            raise
        raise found from None


def private_buckets(buckets: Buckets) -> Buckets:
    """Buckets in memory that training does not change, for a forked process to write while training continues.

    Replaces ``preload_tensors`` (filesystem_async.py:245), which leaves CPU tensors in place and copies those of a
    device into pinned memory. A fork shares pinned memory, and the parent reuses it at once: it drops its references
    when the process has started.
    """
    return [
        (file, key, (data, [(item, pinned_memory.private(tensor)) for item, tensor in tensors]))
        for file, key, (data, tensors) in buckets
    ]


def patient_writer(write: Callable[..., None]) -> Callable[..., None]:
    """``write_preloaded_data`` of Megatron's writer processes, retried while the file system fails.

    Reports errors that an OSError caused as that OSError.
    """

    def write_patiently(*args: Any, results_queue: Any, count_queue: Any, local_proc_idx: int, **options: Any) -> None:
        def once() -> Any:
            reply = _Reply()
            write(*args, results_queue=reply, count_queue=reply, local_proc_idx=local_proc_idx, **options)
            outcome = reply.value[1]
            error = os_error_in(outcome) if isinstance(outcome, Exception) else None
            if error is not None:
                raise error
            return reply.value

        try:
            reply = patiently(once, options["write_bucket"][0])
        except OSError as error:
            plain = OSError(
                error.errno, error.strerror, error.filename
            )  # without the types that other processes cannot unpickle
            reply = (local_proc_idx, plain)
        results_queue.put(reply)
        count_queue.get()
        count_queue.task_done()

    return write_patiently


class _Reply:
    """Replaces both queues of a writer process, and stores what it puts there."""

    def __init__(self) -> None:
        self.value: Any = None

    def put(self, value: Any) -> None:
        self.value = value

    def get(self) -> None: ...

    def task_done(self) -> None: ...


def patient_stand_ins(checkpoint: Path, failures: list[OSError]) -> list[tuple[Any, str, Any]]:
    """(module or class, name, value) for rlhpc.parallel.compat.patient_saves."""
    from megatron.core.dist_checkpointing import core, serialization
    from megatron.core.dist_checkpointing.strategies import common, filesystem_async

    writer, saver = filesystem_async.FileSystemWriterAsync, common.TorchCommonSaveStrategy
    shared_queue = filesystem_async._get_write_results_queue

    def deferred(act: Callable[..., Any]) -> Callable[..., Any]:
        def try_(*args: Any) -> Any:
            try:
                return patiently(lambda: act(*args), checkpoint)
            except OSError as error:
                failures.append(error)
                return args[-1]  # the result of prepare_local_plan; the other functions return nothing

        return try_

    def save_common(self: Any, state: Any, folder: str) -> None:
        if dist.get_rank() == 0:
            write_archive(Path(folder, common.COMMON_STATE_FNAME), state)

    def save_config(config: Any, folder: str) -> None:
        core.save_config(config, folder)
        with open(Path(folder, core.CONFIG_FNAME)) as file:
            os.fsync(file.fileno())

    return [
        # Called only to warn if the folder is not empty. Ours is new.
        (serialization, "Path", lambda path: SimpleNamespace(iterdir=lambda: iter(()))),
        (serialization, "save_config", deferred(save_config)),
        (saver, "save_common", deferred(save_common)),
        (writer, "prepare_local_plan", deferred(writer.prepare_local_plan)),
        (writer, "finish", deferred(writer.finish)),
        (writer, "write_preloaded_data", staticmethod(patient_writer(writer.write_preloaded_data))),
        # All saves share one queue of results (filesystem_async.py:51). Of two models saved in the background at once,
        # each would put the other's results into its metadata if the second one's writer ends first.
        (filesystem_async, "_get_write_results_queue", lambda: shared_queue()._manager.Queue()),
    ]


class _TorchValues(Values):
    def dtype(self, name: str) -> torch.dtype:
        return getattr(torch, name)

    def tensor(
        self, dtype: str, data: bytes, first: int, shape: tuple[int, ...], strides: tuple[int, ...]
    ) -> torch.Tensor:
        kind = self.dtype(dtype)
        flat = torch.frombuffer(bytearray(data), dtype=kind) if data else torch.empty(0, dtype=kind)
        return flat.as_strided(shape, strides, first).clone()  # raises an error for elements outside the storage


class RestrictedLoad:
    """Replacements for the functions that unpickle parts of the checkpoint in ``folder``.

    ``refused``: errors of this rank, which torch raises on all ranks in an exception of its own.
    """

    def __init__(self, folder: Path) -> None:
        self.refused: list[UserError] = []
        self._folder = folder
        self.index = parse_index(folder)
        self._metadata = torch_metadata(self.index)

    def value(self, key: str) -> Any:
        """A value that is not a tensor."""
        file, start, length = self.index.objects[key]
        return read_file(self._folder / file, start, length, _TorchValues())

    def common(self) -> Any:
        """``TorchCommonLoadStrategy.load_common``."""
        return read_file(self._folder / COMMON, values=_TorchValues())

    def metadata(self, reader: Any) -> Metadata:
        """``FileSystemReader.read_metadata``."""
        assert self._metadata.storage_meta is not None
        self._metadata.storage_meta.load_id = reader.load_id
        return self._metadata

    def load_bytes(self, planner: Any, item: Any, value: io.BytesIO) -> None:
        """``DefaultLoadPlanner.load_bytes``."""
        file = planner.metadata.storage_data[item.storage_index].relative_path
        try:
            found = read_bytes(value.getvalue(), self._folder / file, _TorchValues())
        except UserError as error:
            self.refused.append(error)
            raise
        key = item.dest_index.fqn
        if planner.flatten_state_dict:
            set_element(planner.original_state_dict, planner.mappings[key], found)
        else:
            planner.state_dict[key] = found


def torch_metadata(index: Index) -> Metadata:
    """A checkpoint's index in torch's classes."""
    entries: dict[str, Any] = {key: BytesStorageMetadata() for key in index.objects}
    places = {MetadataIndex(key): _StorageInfo(*place) for key, place in index.objects.items()}
    for key, tensor in index.tensors.items():
        dtype = getattr(torch, TORCH_DTYPES.get(tensor.dtype, tensor.dtype))
        chunks = [ChunkStorageMetadata(torch.Size(c.box.start), torch.Size(c.box.shape)) for c in tensor.chunks]
        entries[key] = TensorStorageMetadata(TensorProperties(dtype), torch.Size(tensor.shape), chunks)
        for chunk, part in zip(tensor.chunks, chunks, strict=True):
            places[MetadataIndex(key, part.offsets)] = _StorageInfo(chunk.file, chunk.start, chunk.length)
    return Metadata(entries, storage_data=places, storage_meta=StorageMeta())
