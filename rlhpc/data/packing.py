"""Assigns samples to data-parallel ranks and microbatches.

Deterministic, so that every rank makes the same plan. Work is divided into parts of nearly equal cost. Ranks that wait
for each other in every microbatch get samples of similar cost in each; a pipeline gets the number and order of
microbatches that take the least time.
"""

from __future__ import annotations

import heapq
import random
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rlhpc.core.errors import UserError
from rlhpc.sharding.layout import best_microbatches

Bin = tuple[int, ...]


@dataclass(frozen=True)
class PackPlan:
    """Plan of one minibatch: ``bins[dp_rank][microbatch]`` holds sample ids; ``cost[dp_rank]`` is the rank's work in
    tokens, or the sum of the given costs.

    Every rank has the same number of microbatches; with few samples the last ones are empty. A microbatch has at most
    ``capacity`` tokens, unless it is a single longer sample.
    """

    capacity: int
    bins: tuple[tuple[Bin, ...], ...]
    cost: tuple[int, ...]

    def renumbered(self, ids: Sequence[int]) -> PackPlan:
        """The plan with ``ids[i]`` in place of sample id i."""
        bins = tuple(tuple(tuple(sorted(ids[i] for i in members)) for members in rank) for rank in self.bins)
        return replace(self, bins=bins)


@dataclass(frozen=True)
class Schedule:
    """Waits of ranks besides the end of an update: with ``rows`` for each other in every microbatch, as with
    experts or FSDP over them; in a pipeline for its other stages. ``overhead``: cost of a microbatch beside its
    samples'."""

    rows: bool = False
    stages: int = 1
    virtual_stages: int = 1
    overhead: float = 0.0


def pack(
    lengths: Sequence[int],
    dp: int,
    capacity: int,
    minibatches: int = 1,
    costs: Sequence[int] | None = None,
    schedule: Schedule = Schedule(),
) -> tuple[PackPlan, ...]:
    """Packs samples of ``lengths`` tokens, one plan per minibatch; sample ids are indices into ``lengths``.

    Work is balanced by ``costs`` (see ``sample_costs``; default: the lengths) over ranks and their microbatches. There
    are as few of these as the capacity allows, unless the ``schedule`` gains by more of them.
    Minibatches are contiguous, with sample counts as equal as possible, so that the samples of a prompt stay together
    if their number divides a minibatch's. Raises UserError if a minibatch has fewer samples than ranks.
    """
    assert min(lengths, default=1) > 0, "a sample without tokens"
    ends = [len(lengths) * (index + 1) // minibatches for index in range(minibatches)]
    return tuple(
        _Packer(lengths, lengths if costs is None else costs, range(start, end), dp, capacity).plan(schedule)
        for start, end in zip([0, *ends[:-1]], ends, strict=True)
    )


def sample_costs(lengths: Sequence[int], linear: float, quadratic: float) -> list[int]:
    """Cost of each sequence: ``linear`` per token, ``quadratic`` per pair of a token and one that it attends to."""
    return [round(linear * length + quadratic * (length * (length + 1) // 2)) for length in lengths]


@dataclass(frozen=True)
class _Packer:
    """Packs one minibatch, the samples ``ids``."""

    lengths: Sequence[int]
    costs: Sequence[int]
    ids: Sequence[int]
    dp: int
    capacity: int

    def plan(self, schedule: Schedule) -> PackPlan:
        if len(self.ids) < self.dp:
            raise UserError(
                f"{len(self.ids)} samples in a minibatch cannot feed {self.dp} data-parallel ranks",
                where="train.minibatches",
                remedy="use fewer minibatches or more samples per step",
            )
        ranks = self._ranks(schedule)
        bins = tuple(tuple(tuple(sorted(members)) for members in rank) for rank in ranks)
        return PackPlan(self.capacity, bins, tuple(sum(map(self._cost, rank)) for rank in bins))

    def _cost(self, members: Sequence[int]) -> int:
        return sum(self.costs[i] for i in members)

    def _ranks(self, schedule: Schedule) -> list[list[list[int]]]:
        """The bins of each rank."""
        if schedule.rows and schedule.stages == 1 and self.dp > 1:
            rows = deal_rows(self.lengths, self.costs, self.ids, self.dp, self.capacity, schedule.overhead)
            if rows is not None:
                return [list(rank) for rank in zip(*rows, strict=True)]
        shares = balance(self.costs, self.ids, self.dp)
        fewest = _divide_alike(self.lengths, self.costs, shares, self.capacity)
        if fewest is None:
            return pack_globally(self.lengths, self.costs, self.ids, self.dp, self.capacity)
        return fewest if schedule.stages == 1 else self._for_pipeline(schedule, shares, fewest)

    def _for_pipeline(
        self, schedule: Schedule, shares: Sequence[list[int]], fewest: list[list[list[int]]]
    ) -> list[list[list[int]]]:
        """The number and order of bins with which a pipeline ends first."""
        pipeline = Pipeline(schedule.stages, schedule.overhead, schedule.virtual_stages)
        least, most = len(fewest[0]), min(map(len, shares))
        candidates = [fewest]
        for count in pipeline.counts(max(map(self._cost, shares)), least, max(least, most)):
            if count > least:
                divided = [balance(self.costs, share, count) for share in shares]
                if all(self._fits(members) for rank in divided for members in rank):
                    candidates.append(divided)
        ordered = [arranged for ranks in candidates for arranged in self._arrangements(ranks)]
        return min(ordered, key=lambda ranks: pipeline.time([[*map(self._cost, rank)] for rank in ranks]))

    def _arrangements(self, ranks: list[list[list[int]]]) -> list[list[list[list[int]]]]:
        """The bins in several orders; in each of them those of one place cost alike on all ranks."""
        orders = [list(arranged([*map(self._cost, rank)])) for rank in ranks]
        return [
            [[rank[place] for place in order[kind]] for rank, order in zip(ranks, orders, strict=True)]
            for kind in range(len(orders[0]))
        ]

    def _fits(self, members: Sequence[int]) -> bool:
        return len(members) == 1 or 0 < sum(self.lengths[i] for i in members) <= self.capacity


def _divide_alike(
    lengths: Sequence[int], costs: Sequence[int], shares: Sequence[list[int]], capacity: int
) -> list[list[list[int]]] | None:
    """Divides each share into the same, smallest number of bins; None if a share has too few samples."""
    firsts = [_first_fit(lengths, share, capacity) for share in shares]
    most = max(map(len, firsts))
    least = max(_fewest(lengths, share, capacity) for share in shares)
    for count in range(least, most + 1):
        if min(map(len, shares)) < count:
            return None
        divided = [
            _divide(lengths, costs, share, first, count, capacity) for share, first in zip(shares, firsts, strict=True)
        ]
        if all(bins is not None for bins in divided):
            return [bins for bins in divided if bins is not None]
    raise AssertionError("first fit needs at most this many bins")


def _fewest(lengths: Sequence[int], ids: Sequence[int], capacity: int) -> int:
    """Lower bound of bins: one per sample longer than capacity, plus what the tokens of the others fill."""
    beyond = sum(lengths[i] > capacity for i in ids)
    return max(1, beyond - (-sum(lengths[i] for i in ids if lengths[i] <= capacity) // capacity))


def _divide(
    lengths: Sequence[int], costs: Sequence[int], ids: Sequence[int], first: list[list[int]], count: int, capacity: int
) -> list[list[int]] | None:
    """Exactly ``count`` bins, balanced by costs if they fit the capacity, else by tokens, else from first fit; None if
    none fits."""
    for weights in (costs, lengths):
        bins = balance(weights, ids, count)
        if all(bins) and all(len(members) == 1 or sum(lengths[i] for i in members) <= capacity for members in bins):
            return bins
    return split_bins(lengths, first, count) if len(first) <= count else None


def _first_fit(lengths: Sequence[int], ids: Sequence[int], capacity: int) -> list[list[int]]:
    """Bins of at most ``capacity``: longest sample first, each into the first bin with room, else into a new one."""
    bins: list[list[int]] = []
    room: list[int] = []
    for i in sorted(ids, key=lambda i: (-lengths[i], i)):
        place = next((place for place, free in enumerate(room) if free >= lengths[i]), None)
        if place is None:
            place = len(bins)
            bins.append([])
            room.append(capacity)
        bins[place].append(i)
        room[place] -= lengths[i]
    return bins


def split_bins(lengths: Sequence[int], bins: list[list[int]], count: int) -> list[list[int]]:
    """Halves the fullest bin of several samples until there are ``count`` bins."""
    bins = list(bins)
    while len(bins) < count:
        fullest = max((b for b in bins if len(b) > 1), key=lambda members: sum(lengths[i] for i in members))
        bins.remove(fullest)
        bins += balance(lengths, fullest, 2)
    return bins


def pack_globally(
    lengths: Sequence[int], costs: Sequence[int], ids: Sequence[int], dp: int, capacity: int
) -> list[list[list[int]]]:
    """Packing for samples so long that one rank's share has fewer samples than another rank needs microbatches.

    Forms microbatches over all ranks first, then assigns equal numbers of them; ranks are less evenly loaded.
    """
    bins = _first_fit(lengths, ids, capacity)
    count = -(-len(bins) // dp)
    bins = split_bins(lengths, bins, min(count * dp, len(ids)))
    sums = [sum(costs[i] for i in members) for members in bins]
    ranks: list[list[list[int]]] = [[] for _ in range(dp)]
    totals = [0] * dp
    for place in sorted(range(len(bins)), key=lambda place: (-sums[place], place)):
        rank = min((r for r in range(dp) if len(ranks[r]) < count), key=lambda r: (totals[r], r))
        ranks[rank].append(bins[place])
        totals[rank] += sums[place]
    return [rank + [[]] * (count - len(rank)) for rank in ranks]


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


_BACKWARD = 2.0  # of a forward pass
_FACTORS = (0.5, 0.7, 0.85, 1.0, 1.2, 1.4, 2.0)  # of the best number of equal microbatches, which are tried


@dataclass(frozen=True)
class Pipeline:
    """The stages of a pipeline, and what a microbatch costs beside its samples, in the samples' unit."""

    stages: int
    overhead: float
    virtual_stages: int = 1  # of each stage, interleaved

    def time(self, costs: Sequence[Sequence[float]]) -> float:
        """Time until the slowest rank ends with microbatches of these costs [ranks, microbatches], in their order: of
        one that passes the whole pipeline forward and back it is thrice its cost. The schedule is 1F1B (Narayanan et
        al. 2021); interleaving shortens what is not work by the number of virtual stages (their section 2.2).
        """
        forward = np.asarray(costs, dtype=float) + self.overhead
        work = (1 + _BACKWARD) * (forward.sum(1) + self.overhead * self._blank(forward.shape[1]))
        whole = _one_forward_one_backward(forward, self.stages)
        return float(((whole * self.stages - work).clip(0) / self.virtual_stages + work).max())

    def counts(self, total: float, least: int, most: int) -> list[int]:
        """Numbers of microbatches of a rank with ``total`` cost worth trying, from ``least`` to ``most``."""
        best = best_microbatches(self.stages, self.virtual_stages, total, max(self.overhead, 1e-9 * total, 1e-30))
        found = {min(most, max(least, round(best * factor))) for factor in _FACTORS}
        if self.virtual_stages > 1:  # whole rounds, which blank ones would fill
            found |= {min(most, -(-count // self.stages) * self.stages) for count in found}
        return sorted({least, *found})

    def _blank(self, count: int) -> int:
        return -count % self.stages if self.virtual_stages > 1 else 0


def arranged(costs: Sequence[float]) -> Iterator[list[int]]:
    """Orders in which to run microbatches: the dearest first; small ones at both ends, while stages fill and drain."""
    rising = sorted(range(len(costs)), key=lambda i: (costs[i], i))
    yield rising[::-1]
    yield [*rising[::2], *rising[1::2][::-1]]


def _one_forward_one_backward(forward: np.ndarray, stages: int) -> np.ndarray:
    """[ranks] times of a schedule of passes of ``forward`` [ranks, count], a stage of which takes its ``stages``-th."""
    passes, (ranks, count) = forward / stages, forward.shape
    fore = np.zeros((stages, count, ranks))  # ends
    back = np.zeros((stages, count, ranks))
    free = [np.zeros(ranks) for _ in range(stages)]
    waiting = [iter(_order(stage, stages, count)) for stage in range(stages)]
    following = [next(passes_of, None) for passes_of in waiting]
    done: set[tuple[int, bool, int]] = set()
    while any(following):
        for stage, step in enumerate(following):
            while step is not None:
                is_forward, i = step
                other = stage - 1 if is_forward else stage + 1
                if 0 <= other < stages and (other, is_forward, i) not in done:
                    break
                ends = fore if is_forward else back
                ready = ends[other, i] if 0 <= other < stages else 0.0
                seconds = passes[:, i] * (1.0 if is_forward else _BACKWARD)
                free[stage] = ends[stage, i] = np.maximum(free[stage], ready) + seconds
                done.add((stage, is_forward, i))
                step = following[stage] = next(waiting[stage], None)
    return np.max(free, axis=0)


def _order(stage: int, stages: int, count: int) -> Iterator[tuple[bool, int]]:
    """(whether forward, microbatch) of a stage, in its order."""
    ahead = min(stages - 1 - stage, count)
    yield from ((True, i) for i in range(ahead))
    for i in range(count - ahead):
        yield True, ahead + i
        yield False, i
    yield from ((False, i) for i in range(count - ahead, count))


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


def shuffled(groups: Sequence[int], seed: int, step: int, epoch: int) -> list[int]:
    """Places of samples, whose groups are given, in random order: groups stay together, so that a minibatch has whole
    ones where their number divides, and the samples of each are shuffled too. Determined by the arguments."""
    generator = random.Random(f"shuffle:{seed}:{step}:{epoch}")
    places: dict[int, list[int]] = {}
    for place, group in enumerate(groups):
        places.setdefault(group, []).append(place)
    members = list(places.values())
    generator.shuffle(members)
    for group_places in members:
        generator.shuffle(group_places)
    return [place for group_places in members for place in group_places]
