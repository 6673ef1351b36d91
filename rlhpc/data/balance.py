"""Divides work into parts of nearly equal cost, with or without equal counts. Deterministic, so every rank agrees."""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Sequence

_Part = list[tuple[int, int]]  # (cost, item), the cheapest first

_ROUNDS = 8  # maximum exchanges per item
_DIFFERENCED = 16_384  # maximum items times parts for which largest differencing is also tried


def balance(costs: Sequence[int], ids: Sequence[int], parts: int, *, equal: bool = False) -> list[list[int]]:
    """Divides ``ids`` into ``parts`` of nearly equal total cost; with ``equal``, their counts differ by at most one.

    Assigns the most expensive item first, each to the cheapest part with room (Graham 1969), then exchanges items
    between the most expensive part and cheaper ones while that lowers it. Small problems are also started from largest
    differencing (Karmarkar and Karp 1982), and the better result is returned.
    """
    order = sorted(ids, key=lambda i: (-costs[i], i))
    initial = [_deal_equally if equal else _deal]
    if len(order) * parts <= _DIFFERENCED and not (equal and len(order) % parts):
        initial.append(_difference_equally if equal else _difference)
    divisions = (_improve(costs, divide(costs, order, parts), moves=not equal) for divide in initial)
    return min(divisions, key=lambda members: max(sum(costs[i] for i in part) for part in members))


def _deal(costs: Sequence[int], order: Sequence[int], parts: int) -> list[list[int]]:
    heap = [(0, part) for part in range(parts)]
    members: list[list[int]] = [[] for _ in range(parts)]
    for i in order:
        total, part = heap[0]
        members[part].append(i)
        heapq.heapreplace(heap, (total + costs[i], part))
    return members


def _deal_equally(costs: Sequence[int], order: Sequence[int], parts: int) -> list[list[int]]:
    """Assigns one item to each part per round, the most expensive item to the cheapest part."""
    members: list[list[int]] = [[] for _ in range(parts)]
    totals = [0] * parts
    for start in range(0, len(order), parts):
        places = sorted(range(parts), key=lambda part: (totals[part], part))
        for i, part in zip(order[start : start + parts], places, strict=False):
            members[part].append(i)
            totals[part] += costs[i]
    return members


def _difference(costs: Sequence[int], order: Sequence[int], parts: int) -> list[list[int]]:
    return _merge([[(costs[i], [i])] + [(0, [])] * (parts - 1) for i in order])


def _difference_equally(costs: Sequence[int], order: Sequence[int], parts: int) -> list[list[int]]:
    return _merge(
        [[(costs[i], [i]) for i in order[start : start + parts]] for start in range(0, len(order), parts)],
    )


def _merge(partial: list[list[tuple[int, list[int]]]]) -> list[list[int]]:
    """Merges partial divisions (parts sorted by falling cost) in pairs, most expensive part with cheapest; those with
    the largest cost difference first."""
    heap = [(sets[-1][0] - sets[0][0], place, sets) for place, sets in enumerate(partial)]
    heapq.heapify(heap)
    while len(heap) > 1:
        _, place, sets = heapq.heappop(heap)
        other = heap[0][2]
        joined = [(a + b, x + y) for (a, x), (b, y) in zip(sets, reversed(other), strict=True)]
        joined.sort(key=lambda part: -part[0])
        heapq.heapreplace(heap, (joined[-1][0] - joined[0][0], place, joined))
    return [members for _, members in heap[0][2]]


def _improve(costs: Sequence[int], members: list[list[int]], *, moves: bool) -> list[list[int]]:
    """Lowers the most expensive part by exchanging items for cheaper ones of another part; ``moves``: or for none."""
    parts = [sorted((costs[i], i) for i in part) for part in members]
    totals = [sum(cost for cost, _ in part) for part in parts]
    least = -(-sum(totals) // len(parts))
    for _ in range(_ROUNDS * sum(map(len, parts))):
        dearest = max(range(len(parts)), key=totals.__getitem__)
        if totals[dearest] <= least or not _exchange(parts, totals, dearest, moves=moves):
            break
    return [[i for _, i in part] for part in parts]


def _exchange(parts: list[_Part], totals: list[int], dearest: int, *, moves: bool) -> bool:
    """Makes one exchange that brings the most expensive part and a cheaper one closer; false if there is none."""
    for other in sorted(range(len(parts)), key=totals.__getitem__):
        gap = totals[dearest] - totals[other]
        if gap < 2:
            return False
        found = _best_pair(parts[dearest], parts[other], gap, moves=moves)
        if found is not None:
            _swap(parts, totals, dearest, other, *found)
            return True
    return False


def _best_pair(mine: _Part, theirs: _Part, gap: int, *, moves: bool) -> tuple[int, int | None] | None:
    """Places of an item of mine and a cheaper one of theirs (None: none) whose costs differ by nearly half the gap."""
    half, enough, distance = gap / 2, gap / 16, gap / 2
    best: tuple[int, int | None] | None = None
    for place in range(len(mine) - 1, -1, -1):
        wanted = mine[place][0] - half
        at = bisect_left(theirs, (wanted, -1))
        near: list[tuple[float, int | None]] = [
            (abs(theirs[candidate][0] - wanted), candidate)
            for candidate in (at - 1, at)
            if 0 <= candidate < len(theirs)
        ]
        if moves and at == 0 and len(mine) > 1:
            near.append((abs(wanted), None))
        for off, candidate in near:
            if off < distance:
                distance, best = off, (place, candidate)
        if distance <= enough:
            break
    return best


def _swap(parts: list[_Part], totals: list[int], a: int, b: int, place: int, candidate: int | None) -> None:
    item = parts[a].pop(place)
    change = item[0]
    if candidate is not None:
        back = parts[b].pop(candidate)
        parts[a].insert(bisect_left(parts[a], back), back)
        change -= back[0]
    parts[b].insert(bisect_left(parts[b], item), item)
    totals[a] -= change
    totals[b] += change
