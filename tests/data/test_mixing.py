"""Which source every position of a mixture belongs to, against counting by hand."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from rlhpc.data.files import Mixture

CASES = [
    [1.0],
    [1, 1],
    [0.7, 0.3],
    [0.5, 0.3, 0.2],
    [1, 2, 3, 4, 5],
    [97, 1, 1, 1],
    [0.333, 0.667],
    [1 / 3, 2 / 3],
    *([random.Random(case).randint(1, 40) for _ in range(1 + case % 6)] for case in range(40)),
]


@pytest.mark.parametrize("weights", CASES, ids=str)
def test_every_prefix_has_each_source_in_its_share_to_less_than_one(weights):
    mixture, counts = Mixture(weights), Counter()
    for position in range(min(2 * mixture.period, 3000)):
        source, before = mixture.place(position)
        assert before == counts[source]
        counts[source] += 1
        for other, part in enumerate(mixture.parts):
            assert abs(counts[other] * mixture.period - (position + 1) * part) < mixture.period


@pytest.mark.parametrize("weights", CASES, ids=str)
def test_whole_periods_are_exact(weights):
    mixture = Mixture(weights)
    start = 3 * mixture.period + mixture.period // 2
    found = Counter(mixture.place(start + i)[0] for i in range(mixture.period))
    assert tuple(found[source] for source in range(len(weights))) == mixture.parts


def test_parts_are_the_weights_as_they_are_written():
    assert Mixture([0.7, 0.3]).parts == (7, 3)
    assert Mixture([2, 4]).parts == (1, 2)
    assert Mixture([0.1, 0.2, 0.7]).parts == (1, 2, 7)


def test_weights_that_need_many_positions_are_rounded_and_none_is_lost():
    mixture = Mixture([1e-9, 1, 1 / 3])
    assert mixture.parts == (1, 7500, 2500)


def test_a_place_far_along_is_known_at_once():
    mixture = Mixture([0.7, 0.3])
    assert mixture.place(10**15) == (mixture.place(0)[0], 7 * 10**14)
