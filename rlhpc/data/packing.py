"""Assigns samples to data-parallel ranks and microbatches. Deterministic, so every rank makes the same plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rlhpc.core.errors import UserError
from rlhpc.data.balance import balance
from rlhpc.data.pipeline_time import Pipeline, arranged
from rlhpc.data.rows import deal_rows

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
    """What ranks wait for, beside the end of an update: with ``rows`` for each other in every microbatch, as with
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
