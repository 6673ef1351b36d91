"""Writes files of a checkpoint, and rewrites them after a file system has failed (rlhpc.core.storage)."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

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
