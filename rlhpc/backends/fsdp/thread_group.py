"""Ranks of a process group that are threads of one process: collectives of code that asks for real ones.

results = run_threads(lambda group: program(group), 2)
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

_SECONDS = 60.0  # until the absence of a rank from a collective fails the others
T = TypeVar("T")


class ThreadGroup(dist.ProcessGroup):
    """One thread's end of a group. Has the collectives that attention over context-parallel ranks uses."""

    def __init__(self, rank: int, lockstep: _Lockstep) -> None:
        super().__init__(rank, len(lockstep.tensors))
        self._lockstep = lockstep

    def all_to_all_single(
        self, output: Tensor, given: Tensor, output_sizes: Sequence[int], input_sizes: Sequence[int], options: Any
    ) -> None:
        assert not output_sizes, "parts are equal"
        assert not input_sizes, "parts are equal"
        with self._lockstep.all_of(self.rank(), given) as tensors:
            output.copy_(torch.cat([tensor.chunk(self.size())[self.rank()] for tensor in tensors]))

    def all_gather_single(self, output: Tensor, given: Tensor, options: Any) -> None:
        with self._lockstep.all_of(self.rank(), given) as tensors:
            output.copy_(torch.cat(tensors))

    def reduce_scatter_single(self, output: Tensor, given: Tensor, options: Any) -> None:
        with self._lockstep.all_of(self.rank(), given) as tensors:
            output.copy_(torch.stack([tensor.chunk(self.size())[self.rank()] for tensor in tensors]).sum(0))

    # Their names before torch 2.13.
    alltoall_base, _allgather_base, _reduce_scatter_base = all_to_all_single, all_gather_single, reduce_scatter_single


class _Lockstep:
    """Where the threads of a group lay down their tensors."""

    def __init__(self, size: int) -> None:
        self.tensors: list[Tensor] = [torch.empty(0)] * size
        self._barrier = threading.Barrier(size)

    @contextmanager
    def all_of(self, rank: int, tensor: Tensor) -> Iterator[list[Tensor]]:
        """Every thread's tensor; none goes on before all have left."""
        self.tensors[rank] = tensor
        self._barrier.wait(_SECONDS)
        yield list(self.tensors)
        self._barrier.wait(_SECONDS)

    def abort(self) -> None:
        """Fails the threads that wait here."""
        self._barrier.abort()


def run_threads(program: Callable[[ThreadGroup], T], size: int) -> list[T]:
    """Runs ``program`` in a thread for each rank; returns what each has returned. Raises the first error."""
    lockstep = _Lockstep(size)
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = program(ThreadGroup(rank, lockstep))
        except BaseException as error:
            errors.append(error)
            lockstep.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
    return results
