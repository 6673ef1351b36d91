"""The random order of a step's samples."""

from __future__ import annotations

import itertools
from collections import Counter

from rlhpc.data.packing import shuffled

GROUPS = [0] * 4 + [1] * 3 + [2] * 4 + [5] * 4 + [6]


def test_every_sample_is_there_once_beside_its_group():
    for epoch in range(8):
        order = shuffled(GROUPS, 0, 3, epoch)
        assert sorted(order) == list(range(len(GROUPS)))
        changes = sum(GROUPS[one] != GROUPS[next_one] for one, next_one in itertools.pairwise(order))
        assert changes == len(set(GROUPS)) - 1


def test_the_order_depends_on_seed_step_and_epoch_alone():
    cases = [(seed, step, epoch) for seed in range(3) for step in range(3) for epoch in range(3)]
    orders = [tuple(shuffled(GROUPS, *case)) for case in cases]
    assert len(set(orders)) == len(cases)
    assert orders == [tuple(shuffled(GROUPS, *case)) for case in cases]
    assert shuffled(GROUPS, 0, 3, 1) == [15, 7, 10, 9, 8, 4, 5, 6, 11, 13, 12, 14, 1, 2, 3, 0], "on every machine"


def test_every_group_and_every_sample_of_it_comes_to_every_place():
    orders = [shuffled([0, 0, 1, 1, 2, 2], 0, step, 1) for step in range(600)]
    for place in range(6):
        counts = Counter(order[place] for order in orders)
        assert all(60 < counts[sample] < 140 for sample in range(6)), counts
