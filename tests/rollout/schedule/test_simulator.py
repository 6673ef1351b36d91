"""The simulated schedule is the engines' own, and its times are those that the placement's bounds allow."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlhpc.rollout.schedule.generation_load import (
    GenerationLoad,
    ModelEngine,
    ModelRequest,
    SampledLengths,
    colocated,
    lent_steps,
    makespan,
    shortest_step,
)
from rlhpc.rollout.schedule.simulator import SeparateJob, arrival, separate, with_lending
from rlhpc.rollout.schedule.terms import Costs, Terms
from tests.rollout.schedule.central_rule import plain
from tests.rollout.schedule.worlds import Work

LOAD = GenerationLoad(4, 32, 8, 64, 0.05, 1e-4, train_seconds=4.2, mean_tokens=80, most_tokens=480, switch_seconds=0.05)


class LengthsOf(Work):
    """Responses of one turn with a load's lengths."""

    def __init__(self, load: GenerationLoad) -> None:
        super().__init__(0, load.samples_per_group)
        lengths = SampledLengths(load)
        self.turns = lambda group: [[length] for length in lengths[group]]
        self.keeps = lambda group: True


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
@pytest.mark.parametrize("wrong", [0.8, 1.0, 1.2])
@pytest.mark.parametrize("lenders", [0, 2, 5])
def test_real_times_change_no_action(max_staleness, wrong, lenders):
    """Many steps at once, with jitter and slow trainers: groups start with the versions of the central rule."""
    load = GenerationLoad(3, 6, 2, 4, 0.05, 1e-3, train_seconds=1.0, mean_tokens=20, most_tokens=60, jitter=0.3)
    load = replace(load, lenders=lenders)
    costs = load.costs(wrong, lend=0.8 if lenders else 0.0)
    job = SeparateJob(load, (max_staleness, 6, 1), costs, "recompute")
    job.run()
    terms = Terms(3, 6, max_staleness, job.terms.steps, 4, costs, lenders=lenders)
    versions = {}
    for log in plain(terms, LengthsOf(load))[0]:
        version = 0
        for _, kind, value in log:
            version = value if kind == "switch" else version
            if kind == "admit":
                versions[value] = version
    assert len(job.started) >= 36
    assert job.started == {group: versions[group] for group in job.started}


def test_the_constants_decide_and_nothing_else():
    slow = replace(LOAD, jitter=0.5, seed=LOAD.seed)
    job, other = (SeparateJob(load, (1, 6, 1), LOAD.costs(), "recompute") for load in (LOAD, slow))
    assert job.run().step_seconds != other.run().step_seconds
    common = job.started.keys() & other.started.keys()
    assert len(common) > 150
    assert all(job.started[group] == other.started[group] for group in common)


@pytest.mark.parametrize(("max_staleness", "least"), [(1, 1.15), (2, 1.5)])
def test_separate_is_faster_than_colocated_on_long_tails(max_staleness, least):
    both = colocated(replace(LOAD, engines=8, train_seconds=LOAD.train_seconds / 2))
    found = separate(LOAD, max_staleness)
    assert both.step_seconds / found.step_seconds >= least
    assert found.max_staleness == max_staleness
    assert found.step_seconds <= 1.25 * shortest_step(LOAD, max_staleness)


@pytest.mark.parametrize("max_staleness", [1, 2])
def test_determinism_costs_little_over_arrival_order(max_staleness):
    free = arrival(LOAD, max_staleness, steps=18)
    assert free.max_staleness == max_staleness
    assert separate(LOAD, max_staleness, steps=18).step_seconds <= 1.05 * free.step_seconds
    for wrong in (0.8, 1.2):
        found = separate(LOAD, max_staleness, costs=LOAD.costs(wrong), steps=18)
        assert found.step_seconds <= 1.25 * free.step_seconds


@pytest.mark.heavy
@pytest.mark.parametrize("sizes", [(4, 128), (4, 32), (1, 16), (1, 64)])
def test_trainers_that_lend_wait_at_most_half_as_long(sizes):
    load = replace(LOAD, engines=sizes[0], groups_per_step=sizes[1], lenders=sizes[0], lend_overhead_seconds=0.05)
    load = replace(load, train_seconds=load.full_seconds)
    alone, found = separate(load, 1), with_lending(load, 1)
    assert found.lend_seconds > 0
    assert found.idle_trainers <= 0.5 * alone.idle_trainers
    assert found.step_seconds <= alone.step_seconds
    assert found.max_staleness <= 1


def test_a_step_is_as_long_as_half_of_the_responses_and_what_trainers_do_in_turn():
    """Two responses of 8 steps, one of which is lent; the next batch is trained on when it has come back."""
    load = GenerationLoad(1, 2, 1, 1, 0.5, 0.25, train_seconds=3.0, mean_tokens=8, most_tokens=8, spread=0.0, jitter=0)
    alone = separate(load, 0)
    assert (alone.step_seconds, alone.idle_trainers) == (15.0, pytest.approx(12 / 15))
    lending = replace(load, lenders=1)
    for staleness in (0, 1):  # with 1 it is the next batch that is lent, and training waits for it all the same
        found = separate(lending, staleness, costs=load.costs(lend=20.0))
        assert (found.step_seconds, found.idle_trainers, found.lend_seconds) == (9.0, 0.0, 20.0)
        slow = separate(replace(lending, lend_overhead_seconds=2.0), staleness, costs=load.costs(lend=20.0))
        assert (slow.step_seconds, slow.idle_trainers) == (11.0, pytest.approx(2 / 11))
    part = separate(lending, 0, costs=load.costs(lend=1.5))  # two steps; then it waits for the engine's slot
    assert part.step_seconds == pytest.approx(6.0 + 6 * 0.75 + 3.0)


def test_lenders_are_not_used_where_they_bring_nothing():
    """Each change of the trainers' ranks takes longer than a step."""
    slow = replace(LOAD, lenders=4, lend_overhead_seconds=30.0)
    assert with_lending(slow, 1) == separate(slow, 1)


def test_a_lender_stops_at_the_first_step_after_its_time_or_without_requests():
    bundle, costs = [ModelRequest(3, 0), ModelRequest(5, 0), ModelRequest(9, 1)], Costs(4, 1, 1)
    assert list(lent_steps(costs, bundle, 24)) == [(3, 3), (1, 2)]  # 21, 27
    assert list(lent_steps(costs, bundle, 1000)) == [(3, 3), (2, 2), (4, 1)]
    assert list(lent_steps(costs, [], 24)) == []


def test_a_model_engine_lends_the_last_requests_and_has_them_back_in_order():
    engine = ModelEngine(2)
    engine.admit(0, [5, 1])
    engine.admit(1, [4, 8])
    engine.advance(1)  # the second has ended, the third runs
    assert engine.withdraw(1, 2) == [[ModelRequest(4, 1)], [ModelRequest(8, 1, 1)]]
    assert engine.requests == 1
    engine.withdraw(1, 1)
    engine.take_back([ModelRequest(0, 1), ModelRequest(6, 1), ModelRequest(2, 0)])
    assert engine.left == {0: 1, 1: 1}
    assert [request.group for *_, request in engine.running] == [0, 1]
    assert engine.advance(2) == [0]


def test_finishing_on_old_weights_costs_more_than_recomputing():
    found = separate(LOAD, 1, in_flight="finish").step_seconds / separate(LOAD, 1).step_seconds
    assert 1.2 <= found <= 1.8


def test_a_filter_costs_what_it_drops():
    filtered = replace(LOAD, kept=0.5, groups_per_step=16)
    found, free = separate(filtered, 1, steps=8), arrival(filtered, 1, steps=8)
    assert found.max_staleness <= 1 >= free.max_staleness
    assert found.step_seconds > separate(replace(filtered, kept=1.0), 1, steps=8).step_seconds
    assert found.step_seconds <= 1.5 * free.step_seconds


def test_one_response_takes_its_tokens_times_a_step():
    load = GenerationLoad(
        1, 1, 1, 1, 0.5, 0.25, train_seconds=3.0, mean_tokens=8, most_tokens=8, spread=0.0, jitter=0.0
    )
    assert makespan(load) == 8 * 0.75
    assert load.costs() == Costs.of_seconds(0.5, 0.25, 3.0)
    assert shortest_step(load, 0) == separate(load, 0).step_seconds == arrival(load, 0).step_seconds == 9.0
    assert colocated(load).step_seconds == 9.0
    assert separate(load, 1).step_seconds == arrival(load, 1).step_seconds == 6.0
