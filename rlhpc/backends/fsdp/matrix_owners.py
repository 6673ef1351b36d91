"""Computes on whole matrices: each is gathered on one rank of a copy of the weights, and its result returned in shards.

The owners follow from shapes and number of shards alone. In every layout a result is that of the same whole matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor

from rlhpc.backends.fsdp.matrices import Matrix

ROUND = 1 << 24  # elements of the matrices that a rank gathers at once, unless a single one has more


def assign(matrices: Iterable[Matrix], shards: int) -> list[list[Matrix]]:
    """The matrices of each owner, largest first, balanced by their cost.

    One that a rank holds whole stays there, unless that would give the rank more than its share.
    """
    ordered = sorted(matrices, key=_cost, reverse=True)
    share = sum(map(_cost, ordered)) / shards
    loads = [0] * shards
    owned: list[list[Matrix]] = [[] for _ in range(shards)]
    for matrix in ordered:
        owner, holding = loads.index(min(loads)), matrix.holding(shards)
        if len(holding) == 1 and loads[holding[0]] + _cost(matrix) <= max(share, loads[owner] + _cost(matrix)):
            owner = holding[0]
        loads[owner] += _cost(matrix)
        owned[owner].append(matrix)
    return owned


def _cost(matrix: Matrix) -> int:
    """Multiplications of a Newton-Schulz step."""
    short, long = sorted(matrix.shape)
    return 2 * short * short * long + short**3


def _batches(matrices: Sequence[Matrix], most: int) -> list[list[Matrix]]:
    """Consecutive matrices of at most ``most`` elements together, or single ones."""
    batches: list[list[Matrix]] = []
    held = most
    for matrix in matrices:
        rows, columns = matrix.shape
        held += rows * columns
        if held > most:
            batches.append([])
            held = rows * columns
        batches[-1].append(matrix)
    return batches


@dataclass(frozen=True)
class _Round:
    """Matrices in flight at once: ``given`` by this rank, in the order of their owners, and its own, ``owned``.

    Elements of this rank's part of each given one, and of every rank's part of each owned one.
    """

    given: list[list[Matrix]]
    owned: list[Matrix]
    given_sizes: list[list[int]]
    owned_sizes: list[list[int]]


class MatrixOwners:
    """Runs a function on every matrix of this rank's copy of the weights. ``device`` computes and communicates."""

    def __init__(
        self, matrices: Iterable[Matrix], group: dist.ProcessGroup, device: torch.device, most: int = ROUND
    ) -> None:
        self._group, self._device = group, device
        shards, index = group.size(), group.rank()
        self.owned = assign(matrices, shards)
        queues = [_batches(some, most) for some in self.owned]
        self._rounds = []
        for number in range(max(map(len, queues))):
            given = [queue[number] if number < len(queue) else [] for queue in queues]
            given_sizes = [[matrix.numel_held(shards, index) for matrix in some] for some in given]
            owned_sizes = [[matrix.numel_held(shards, source) for matrix in given[index]] for source in range(shards)]
            self._rounds.append(_Round(given, given[index], given_sizes, owned_sizes))

    def run(
        self,
        read: Callable[[Matrix], Float[Tensor, " held"]],
        compute: Callable[[Float[Tensor, "m n"]], Float[Tensor, "m n"]],
        write: Callable[[Matrix, Float[Tensor, " held"]], None],
    ) -> None:
        """Passes each matrix whole to ``compute``, from what each rank ``read``s of it, and this rank's part of the
        result to ``write``. Collective over the ranks of a copy."""
        for now in self._rounds:
            sent = torch.cat([read(matrix).to(self._device) for some in now.given for matrix in some])
            arrived = self._exchange(sent, now.given_sizes, now.owned_sizes)
            parts = arrived.split([size for sizes in now.owned_sizes for size in sizes])
            for number, matrix in enumerate(now.owned):
                _compute(matrix, parts[number :: len(now.owned)], compute)
            results = self._exchange(arrived, now.owned_sizes, now.given_sizes)
            blocks = iter(results.split([size for sizes in now.given_sizes for size in sizes]))
            for matrix in (matrix for some in now.given for matrix in some):
                write(matrix, next(blocks))

    def _exchange(self, flat: Tensor, sent: list[list[int]], received: list[list[int]]) -> Tensor:
        """Sends each rank its elements of ``flat``; returns those from all ranks, in their order."""
        if self._group.size() == 1:
            return flat
        sizes = [sum(some) for some in received]
        arrived = flat.new_empty(sum(sizes))
        dist.all_to_all_single(arrived, flat, sizes, [sum(some) for some in sent], group=self._group)
        return arrived


def _compute(matrix: Matrix, parts: Sequence[Tensor], compute: Callable[[Tensor], Tensor]) -> None:
    """Replaces a matrix, of which each rank has sent some rows, by the result."""
    rows = [part.view(-1, len(matrix.columns)) for part in parts]
    results = compute(torch.cat(rows)).split([len(part) for part in rows])
    for part, result in zip(rows, results, strict=True):
        part.copy_(result)
