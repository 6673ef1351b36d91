"""Deals samples to ranks that wait for each other in every microbatch: those of one row should cost alike."""

from __future__ import annotations

from collections.abc import Sequence

from rlhpc.data.balance import balance

Row = list[list[int]]  # the samples of each rank in one microbatch
_MORE = 3  # numbers of rows that are tried, beyond the fewest
_GOOD = 1.005  # times the mean load: no more of them are tried


def deal_rows(
    lengths: Sequence[int], costs: Sequence[int], ids: Sequence[int], ranks: int, capacity: int, overhead: float
) -> list[Row] | None:
    """Rows of at most ``capacity`` tokens for each rank, or of one longer sample, such that the sum of their greatest
    costs is low; each costs ``overhead`` beside its samples. None if there are too few samples for one on every rank in
    every row."""
    least = max(1, -(-sum(lengths[i] for i in ids) // (capacity * ranks)))
    found: list[list[Row]] = []
    for count in range(least, min(len(ids) // ranks, 2 * least + _MORE) + 1):
        rows = _dealt(lengths, costs, ids, ranks, capacity, count)
        if rows is not None:
            found.append(rows)
            if len(found) > _MORE or waited(costs, rows) * ranks <= _GOOD * sum(costs[i] for i in ids):
                break
    return min(found, key=lambda rows: waited(costs, rows) + len(rows) * overhead, default=None)


def waited(costs: Sequence[int], rows: Sequence[Row]) -> int:
    """Sum of the greatest costs of rows: the time of ranks that wait for each other in each of them."""
    return sum(max(sum(costs[i] for i in members) for members in row) for row in rows)


def _dealt(
    lengths: Sequence[int], costs: Sequence[int], ids: Sequence[int], ranks: int, capacity: int, count: int
) -> list[Row] | None:
    """Exactly ``count`` rows; None if not all samples fit.

    While the longest sample left costs more than a microbatch of equal rows would, it sets the cost of a row, which is
    filled to it. The rest is divided equally.
    """
    left = sorted(ids, key=lambda i: (-costs[i], i))
    rows: list[Row] = []
    for remaining in range(count, 0, -1):
        equal = sum(costs[i] for i in left) / (remaining * ranks)
        if costs[left[0]] <= equal:
            break
        row = _filled(lengths, costs, left, ranks, capacity)
        rows.append(row)
        taken = {i for members in row for i in members}
        left = [i for i in left if i not in taken]
        if len(left) < (remaining - 1) * ranks:
            return None
    remaining = count - len(rows)
    if not left:
        return rows if not remaining else None
    if not remaining:
        return None
    bins = balance(costs, left, remaining * ranks)
    if any(len(members) > 1 and sum(lengths[i] for i in members) > capacity for members in bins) or not all(bins):
        return None
    return [*rows, *(bins[start : start + ranks] for start in range(0, len(bins), ranks))]


def _filled(lengths: Sequence[int], costs: Sequence[int], left: Sequence[int], ranks: int, capacity: int) -> Row:
    """One row: the samples that cost most, one for each rank, and others while none costs more than the first."""
    row = [[i] for i in left[:ranks]]
    room = [capacity - lengths[i] for i in left[:ranks]]
    budget = [costs[left[0]] - costs[i] for i in left[:ranks]]
    for i in left[ranks:]:
        fits = [rank for rank in range(ranks) if room[rank] >= lengths[i] and budget[rank] >= costs[i]]
        if fits:
            rank = max(fits, key=lambda rank: (budget[rank], -rank))
            row[rank].append(i)
            room[rank] -= lengths[i]
            budget[rank] -= costs[i]
    return row
