"""Ranks that wait for each other in every microbatch get rows of like cost."""

from __future__ import annotations

import random

import pytest

from rlhpc.data.packing import Schedule, pack, sample_costs
from tests.helpers.balance_table import CAPACITY, MODELS, drawn, waited

ROWS = Schedule(rows=True)


@pytest.mark.parametrize(("spread", "per_rank"), [(0.7, 16), (0.7, 64), (1.0, 16), (1.0, 64)])
@pytest.mark.parametrize("ranks", [2, 8])
def test_ranks_wait_little_more_than_they_must(ranks: int, spread: float, per_rank: int) -> None:
    for terms in MODELS.values():
        lengths = drawn(per_rank * ranks, spread, seed=1)
        assert waited(lengths, sample_costs(lengths, *terms), ranks, rows=True) <= 1.01


def test_equal_totals_alone_make_ranks_wait() -> None:
    lengths = drawn(16 * 8, 1.0, seed=1)
    assert waited(lengths, sample_costs(lengths, *MODELS["0.5B"]), 8, rows=False) > 1.1


def test_random_rows_keep_every_rule() -> None:
    for seed in range(300):
        draw = random.Random(seed)
        ranks, capacity = draw.randint(2, 6), draw.choice([10, 40, 200, 10**6])
        lengths = [int(draw.lognormvariate(3, 1.2)) + 1 for _ in range(ranks * draw.randint(1, 12))]
        (plan,) = pack(lengths, ranks, capacity, costs=[length**2 for length in lengths], schedule=ROWS)
        assert len(plan.bins) == ranks
        assert len({len(rank) for rank in plan.bins}) == 1
        assert sorted(i for rank in plan.bins for members in rank for i in members) == list(range(len(lengths)))
        for rank in plan.bins:
            assert rank[0]
            assert all(len(m) <= 1 or sum(lengths[i] for i in m) <= capacity for m in rank)
        again = pack(lengths, ranks, capacity, costs=[length**2 for length in lengths], schedule=ROWS)
        assert again == (plan,)


def test_a_row_more_must_save_more_than_it_costs() -> None:
    lengths = drawn(16 * 2, 1.0, seed=2)
    costs = sample_costs(lengths, *MODELS["0.5B"])
    counts = [
        len(pack(lengths, 2, CAPACITY, costs=costs, schedule=Schedule(rows=True, overhead=overhead))[0].bins[0])
        for overhead in (0.0, max(costs))
    ]
    assert counts == [5, 4]
