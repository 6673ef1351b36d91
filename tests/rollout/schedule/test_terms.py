"""The constants of a schedule, from the config, and the batches that they lead to."""

from __future__ import annotations

import random
from typing import Any

import pytest

from rlhpc.config.schema import RunConfig
from rlhpc.core.errors import UserError
from rlhpc.rollout.schedule.batches import Batches
from rlhpc.rollout.schedule.terms import Costs, Terms, terms_of

COSTS = {"step_seconds": 0.05, "sequence_seconds": 1e-4, "train_seconds": 20.0}


def config(costs: dict[str, Any] | None = None, **train: Any) -> RunConfig:
    section = {"max_staleness": 2, "in_flight": "finish", "costs": COSTS if costs is None else costs}
    return RunConfig.model_validate(
        {
            "name": "x",
            "model": {"path": "model"},
            "data": {"train": ["train.jsonl"]},
            "rollout": {"max_num_seqs": 48, "ranks": 1},
            "placement": "separate",
            "asynchrony": section,
            "train": {"steps": 7, "prompts_per_step": 32, **train},
        }
    )


def test_terms_follow_the_config():
    found = terms_of(config(), engines=3)
    assert found == Terms(3, 32, 2, 7, 48, Costs(50_000_000, 100_000, 20_000_000_000, 1_000_000_000), "finish")
    assert Costs.of_seconds(0.05, 1e-4, 20.0) == found.costs
    assert found.costs.engine_step(10) == 51_000_000


def test_lenders_have_the_time_of_the_config():
    """Each helps one engine, in turn; without lenders the time is of no account."""
    lending = config({**COSTS, "lend_seconds": 2.5})
    found = terms_of(lending, engines=3, lenders=4)
    assert (found.lenders, found.lend) == (4, 2_500_000_000)
    assert [list(found.lenders_of(engine)) for engine in range(3)] == [[0, 3], [1], [2]]
    assert terms_of(lending, engines=3).lend == 0


def test_replayed_groups_are_not_generated():
    assert terms_of(config(replay={"capacity": 100}), engines=1).groups_per_step == 24
    assert terms_of(config(replay={"capacity": 5}), engines=1).groups_per_step == 27


def test_dynamic_sampling_limits_a_batch():
    found = terms_of(config(dynamic_sampling={"max_batches": 3}, replay={"capacity": 100}), engines=1)
    assert (found.filtered, found.groups_per_step, found.batch_limit) == (True, 24, 72)


@pytest.mark.parametrize(
    ("costs", "text"),
    [
        ({}, "step_seconds, sequence_seconds, train_seconds not set"),
        ({**COSTS, "train_seconds": None}, "asynchrony.costs: train_seconds not set"),
        ({**COSTS, "train_seconds": 0.0}, "stand still"),
        ({**COSTS, "step_seconds": 0.0, "sequence_seconds": 1e-10}, "stand still"),
    ],
)
def test_costs_must_be_set_and_advance_the_clock(costs, text):
    with pytest.raises(UserError, match=text):
        terms_of(config(costs), engines=1)


@pytest.mark.parametrize("seed", range(40))
def test_every_group_is_in_one_batch_in_order_whatever_the_order_of_verdicts(seed):
    rng = random.Random(seed)
    size, limit = rng.randint(1, 5), rng.choice([0, 6])
    terms = Terms(1, size, 0, 9, 1, Costs(1, 0, 1), filtered=True, batch_limit=limit)
    keeps = [rng.random() < 0.5 for _ in range(60)]
    order = list(range(60))
    rng.shuffle(order)
    batches, found = Batches(terms), []
    for group in order:
        batches.judge(group, keeps[group])
        while (batch := batches.close()) is not None:
            found.append(batch)
    assert [batch.number for batch in found] == list(range(len(found)))
    seen = [group for batch in found for group in sorted((*batch.kept, *batch.dropped))]
    assert seen == list(range(len(seen)))
    for batch in found:
        assert all(keeps[group] == (group in batch.kept) for group in batch.groups)
        assert len(batch.kept) == size or (len(batch.kept) < size and len(batch.groups) == limit)
    assert sum(keeps[len(seen) :]) < size
    assert not limit or 60 - len(seen) < limit


def test_batches_of_a_resumed_run_begin_at_its_cursor():
    batches = Batches(Terms(2, 2, 0, 9, 1, Costs(1, 0, 1)), number=4, first=9)
    batches.judge(8)  # trained before
    batches.judge(10)
    assert batches.close() is None
    batches.judge(9)
    batch = batches.close()
    assert batch is not None
    assert (batch.number, batch.kept, batch.dropped) == (4, (9, 10), ())
