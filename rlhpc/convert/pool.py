"""Forked worker processes of a conversion: concurrent.futures, with what each worker does first."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import active_children, get_context
from typing import Any, TypeVar

from rlhpc.checkpoint.formats.arrays import reuse_memory
from rlhpc.core.errors import UserError
from rlhpc.core.process import ProcessId, die_with

T = TypeVar("T")
R = TypeVar("R")


def run_tasks(prepare: Callable[[], Callable[[T], R]], tasks: Sequence[T], workers: int) -> Iterator[tuple[int, R]]:
    """Index and result of each task as it finishes; ``prepare`` is called in each worker and returns what runs a task.

    One worker, or one task, runs in this process. Others are forked, so that they start at once and share ``tasks`` and
    imports. They ignore Ctrl-C, and end with this process or with the first error. Raises what a task raised, or
    UserError if a worker was killed.
    """
    workers = min(workers, len(tasks))
    if workers <= 1:
        reuse_memory()
        act = prepare()
        for index, task in enumerate(tasks):
            yield index, act(task)
        return
    arguments = (prepare, tasks, ProcessId.own())
    pool = ProcessPoolExecutor(workers, get_context("fork"), initializer=_begin, initargs=arguments)
    try:
        futures = {pool.submit(_run, index): index for index in range(len(tasks))}
        for future in as_completed(futures):
            yield futures[future], future.result()
    except BrokenProcessPool as error:
        message = "a worker process was killed, perhaps because memory ran out"
        raise UserError(message, where="--workers", remedy="run the same command again, with fewer workers") from error
    except BaseException:
        for child in active_children():
            child.kill()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


_worker: tuple[Callable[[Any], Any], Sequence[Any]] | None = None  # in a worker process


def _begin(prepare: Callable[[], Callable[[T], R]], tasks: Sequence[T], parent: ProcessId) -> None:
    global _worker
    reuse_memory()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with(parent)
    _worker = prepare(), tasks


def _run(index: int) -> Any:
    assert _worker is not None
    act, tasks = _worker
    return act(tasks[index])
