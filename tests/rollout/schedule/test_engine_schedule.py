"""Engines that know only each other's news follow the rule, in any real time, through kills and restarts."""

from __future__ import annotations

import random

import pytest

from tests.rollout.schedule.worlds import Job, Work, check_rule, plain, terms_by


def case(seed: int):
    rng = random.Random(f"case {seed}")
    terms = terms_by(rng)
    work = Work(seed, rng.randint(1, 3), rng.choice([0.0, 0.5]), rng.choice([0.2, 0.7]), rng.choice([0.5, 1.5]))
    return terms, work


@pytest.mark.parametrize("seed", range(12))
def test_all_interleavings_follow_the_rule(seed):
    terms, work = case(seed)
    logs, batches = plain(terms, work)
    check_rule(terms, work, logs, batches)
    for order in range(2):
        assert Job(terms, work, order).run() == logs
    assert Job(terms, work, 3, kills=4).run() == logs
