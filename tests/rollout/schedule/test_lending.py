"""Engines lend requests in every real time alike, and rely on no more of each other than what comes true."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from rlhpc.rollout.schedule.actions import Admit, EngineStep, Lend, Switch, TakeBack
from rlhpc.rollout.schedule.engine_schedule import EngineSchedule
from rlhpc.rollout.schedule.knowledge import Time
from rlhpc.rollout.schedule.terms import Costs, Terms
from tests.rollout.schedule.central_rule import Rule, plain
from tests.rollout.schedule.worlds import Job, Work, check_rule, terms_by


def case(seed: int) -> tuple[Terms, Work]:
    rng = random.Random(f"lend {seed}")
    terms = replace(terms_by(rng, rng.randint(0, 8)), engines=rng.randint(1, 4))
    work = Work(seed, rng.randint(1, 3), rng.choice([0.0, 0.5]), rng.choice([0.2, 0.7]), rng.choice([0.5, 1.5]))
    return terms, work


def check_lending(seed: int) -> None:
    terms, work = case(seed)
    logs, batches = plain(terms, work)
    check_rule(terms, work, logs, batches)
    assert Job(terms, work, 0).run() == Job(terms, work, 1, kills=4).run() == logs
    for engine, log in enumerate(logs):
        lent = [(when, value) for when, kind, value in log if kind == "lend"]
        assert len(lent) == (terms.steps if terms.lenders_of(engine) else 0)  # once per version
        back = sorted(when for when, kind, _ in log if kind == "take back")
        bundles = [when + time for when, (each, time) in lent if each for _ in terms.lenders_of(engine)]
        assert len(back) == len(bundles)
        assert all(when >= end for when, end in zip(back, bundles, strict=True))


@pytest.mark.parametrize("seed", [0, 1, 2, 5, 13, 16, 28, 33])
def test_all_interleavings_lend_and_take_back_alike(seed):
    check_lending(seed)


@pytest.mark.long
@pytest.mark.parametrize("first", range(100, 400, 20))
def test_many_interleavings_lend_and_take_back_alike(first):
    for seed in range(first, first + 20):
        check_lending(seed)


class Watched(EngineSchedule):
    """Notes what it relies on: of each engine the earliest time of an end that it does not know, and of the next due
    time."""

    relied: list[tuple[set[int], list[Time], int, Time]]

    def _horizon(self) -> list[Time]:
        found, known = super()._horizon(), self._known
        self.relied.append((set(known.ends), found, known.settled + 1, known.earliest_due(found)))
        return found


@pytest.mark.parametrize(
    "seed", [40, 47, 53, 57, 60, 61, *(pytest.param(n, marks=pytest.mark.long) for n in range(64, 96))]
)
def test_nothing_happens_before_the_time_that_others_rely_on(seed):
    terms, work = case(seed)
    relied: list[tuple[set[int], list[Time], int, Time]] = []
    job = Job(terms, work, 2)
    for schedule in job.schedules:
        schedule.__class__, schedule.relied = Watched, relied
    job.run()
    rule = Rule(terms, work)
    rule.run()
    for known, horizon, version, earliest in relied:
        assert version >= len(rule.due) or rule.due[version] >= earliest
        first = rule.firsts[version - 1]  # ends of earlier groups are forgotten
        late = [group for group in rule.ends if group >= first and group not in known]
        assert all(rule.ends[group] >= horizon[terms.engine_of(group)] for group in late)


def lending(train: int = 40, **values: int) -> EngineSchedule:
    terms = Terms(1, 4, 1, 3, 2, Costs(5, 1, train, lend=values.pop("lend", 30)), lenders=values.pop("lenders", 2))
    return EngineSchedule(terms, 0)


def admit(schedule: EngineSchedule) -> int:
    """Starts all groups that it may, of one request each; how many."""
    count = 0
    while isinstance(action := schedule.next(), Admit):
        schedule.admitted(action.group, 1)
        count += 1
    return count


def test_an_engine_takes_on_what_its_lenders_hold_as_well():
    schedule = lending()
    assert admit(schedule) == 2 * 3
    assert schedule.next() == Lend(2, 30)
    schedule.lent(2, left=2)
    for _ in range(5):
        assert schedule.next() == EngineStep()
        schedule.stepped(2, left=2)
    assert schedule.next() == TakeBack(0)
    assert schedule.clock == 35
    schedule.taken_back(0, left=3, ended=[2])
    assert schedule.next() == TakeBack(1)
    schedule.taken_back(1, left=4, calls=[8])
    assert schedule.next() == EngineStep()


def test_training_begins_after_the_time_in_which_trainers_generate():
    """The batch has ended at 7; trainers generate until 30."""
    schedule = EngineSchedule(Terms(1, 2, 1, 3, 2, Costs(5, 1, 40, lend=30), lenders=1), 0)
    assert admit(schedule) == 4
    schedule.lent(2, left=2)
    schedule.stepped(2, left=0, ended=[0, 1])
    assert (schedule.next(), schedule.clock) == (TakeBack(0), 30)
    schedule.taken_back(0, left=0, ended=[2, 3])
    assert (schedule.next(), schedule.clock) == (Switch(1), 30 + 40)


def test_an_engine_that_is_late_at_its_switch_lends_nothing():
    schedule = lending(lenders=1)
    admit(schedule)
    schedule.lent(0, left=4)
    for _ in range(4):
        schedule.stepped(2, left=4)
    schedule.stepped(2, left=0, ended=[0, 1, 2, 3])  # at 35: due at 75
    admit(schedule)
    schedule.stepped(1000, left=4)
    assert schedule.next() == Switch(1)
    schedule.switched(1)
    assert schedule.next() == Lend(0, 0)
    schedule.lent(0, left=4)
    assert schedule.next() == EngineStep()


def test_no_engine_switches_while_its_lenders_have_requests():
    schedule = lending(lenders=1)
    admit(schedule)
    schedule.lent(2, left=2)
    with pytest.raises(AssertionError, match="lenders have requests"):
        schedule.switched(1)
    with pytest.raises(AssertionError, match="requests of lender 1, not 0"):
        schedule.taken_back(1, left=2)
