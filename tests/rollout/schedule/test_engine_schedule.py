"""Engines that know only each other's news follow the rule, in any real time, through kills and restarts."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest

from rlhpc.rollout.schedule.actions import Admit, Answer, AwaitNews, EngineStep, Switch
from rlhpc.rollout.schedule.engine_schedule import EngineSchedule
from rlhpc.rollout.schedule.states import first_state, redistributed
from rlhpc.rollout.schedule.terms import Costs, Terms
from tests.rollout.schedule.central_rule import plain
from tests.rollout.schedule.worlds import Job, Work, check_rule, terms_by


def case(seed: int) -> tuple[Terms, Work]:
    rng = random.Random(f"case {seed}")
    terms = terms_by(rng)
    work = Work(seed, rng.randint(1, 3), rng.choice([0.0, 0.5]), rng.choice([0.2, 0.7]), rng.choice([0.5, 1.5]))
    return terms, work


# The last ones have ties of two events, verdicts that are late, and tool calls while a response must end.
@pytest.mark.parametrize("seed", [0, 3, 4, 5, 6, 26, 57, 133])
def test_all_interleavings_follow_the_rule(seed):
    terms, work = case(seed)
    logs, batches = plain(terms, work)
    check_rule(terms, work, logs, batches)
    for order in range(2):
        assert Job(terms, work, order).run() == logs
    job = Job(terms, work, 3, kills=4)
    assert job.run() == logs


@pytest.mark.long
@pytest.mark.parametrize("seed", range(200, 260))
def test_many_interleavings_follow_the_rule(seed):
    terms, work = case(seed)
    logs, batches = plain(terms, work)
    check_rule(terms, work, logs, batches)
    assert Job(terms, work, 0).run() == Job(terms, work, 1, kills=4).run() == logs


@pytest.mark.parametrize(("in_flight", "lenders"), [("recompute", 0), ("recompute", 4), ("finish", 0)])
def test_a_run_that_begins_later_is_the_same(in_flight, lenders):
    """At version 3 and group 60: all numbers are shifted."""
    terms = Terms(3, 4, 1, 4, 3, Costs(5, 1, 40, 30, lend=50), in_flight, filtered=True, lenders=lenders)
    work = Work(1, 2, tools=0.5, drops=0.4)
    logs = Job(terms, work, 0).run()
    later = Work(1, 2)
    later.turns, later.keeps = (lambda group: work.turns(group - 60)), (lambda group: work.keeps(group - 60))
    job = Job(replace(terms, steps=7), later, 1, states=[first_state(3, 60)] * 3)
    shift = {"switch": 3, "admit": 60}
    assert job.run() == [
        [(when, kind, value + shift[kind] if kind in shift else value) for when, kind, value in log] for log in logs
    ]


@pytest.mark.parametrize("engines", [1, 2, 5])
@pytest.mark.parametrize(("filtered", "lenders"), [(True, 0), (False, 0), (True, 3)])
def test_another_number_of_engines_loses_and_repeats_no_group(engines, filtered, lenders):
    costs, work = Costs(5, 1, 40, 30, lend=50), Work(1, 2, tools=0.5, drops=0.3)
    terms = Terms(3, 4, 2, 6, 3, costs, filtered=filtered, lenders=lenders)
    job = Job(terms, work, 0)
    job.run()
    saved = [job.saved[3][engine] for engine in range(3)]
    states = [json.loads(state) for state, _, _ in saved]
    new = replace(terms, engines=engines)
    resumed = Job(new, work, 0)
    models = resumed.models
    for _, model, _ in saved:
        for group, turns in model.requests:
            models[group % engines].requests.append((group, turns))
        for call in model.calling.values():
            place = models[call[0] % engines]
            place.keys += 1
            place.calling[place.keys] = call
        for group, left in model.left.items():
            models[group % engines].left[group] = left
    requests, calls = [len(model.requests) for model in models], [list(model.calling) for model in models]
    moved = json.loads(json.dumps(redistributed(new, states, requests, calls)))
    again = Job(new, work, 1, states=moved)
    again.models = models
    again.run()
    started = [
        [value for _, kind, value in log if kind == "admit"] for log in (*(log for _, _, log in saved), *again.logs)
    ]
    groups = [group for log in started for group in log]
    assert len(groups) == len(set(groups))
    assert set(groups) >= set(range(again.closed[-1].end))
    assert [batch.number for batch in again.closed] == [3, 4, 5]
    assert min(again.closed[0].groups) == min(job.closed[3].groups)


def test_a_switch_goes_before_an_answer_at_the_same_time():
    terms = Terms(2, 1, 1, 2, 1, Costs(0, 1, 5, 10))
    first, second = (EngineSchedule(terms, engine) for engine in range(2))
    assert second.next() == Admit(1)
    second.admitted(1, 1)
    first.admitted(0, 1)
    for _ in range(5):
        first.stepped(1, left=1)
    assert second.next() == EngineStep()  # at 0, before anything of the other's is known
    second.stepped(1, left=0, calls=[7])
    second.learn(0, first.news())
    assert second.next() == AwaitNews()  # version 1 may be due at 5 + 1 + 5, as the answer is
    first.stepped(1, left=0, ended=[0])
    second.learn(0, first.news())
    assert (second.next(), second.clock) == (Switch(1), 11)
    second.switched(1)
    assert second.next() == Answer(7)


def test_news_are_read_once_and_forgotten_when_all_have_settled_them():
    terms = Terms(2, 2, 4, 9, 1, Costs(0, 1, 5))
    first, second = (EngineSchedule(terms, engine) for engine in range(2))
    old = second.news()
    for group in range(0, 16, 2):
        for engine, schedule in ((0, first), (1, second)):
            schedule.admitted(group + engine, 1)
            schedule.stepped(1, left=0, ended=[group + engine])
        first.learn(1, second.news())
        first.learn(1, old)
        second.learn(0, first.news())
        while isinstance(action := first.next(), Switch):
            first.switched(action.version)
        while isinstance(action := second.next(), Switch):
            second.switched(action.version)
    assert first.batch_of(15) == second.batch_of(14) == 7
    assert first.batch_of(16) is None
    assert (first.version, second.version, first.first_needed) == (4, 4, 8)
    assert [group for group, _ in first.news()["facts"]] == [8, 10, 12, 14]
    assert first.batch_of(7) is None


def test_a_step_without_requests_takes_as_long_as_the_others_rely_on():
    schedule = EngineSchedule(Terms(2, 2, 0, 3, 1, Costs(0, 3, 1)), 0)
    schedule.admitted(0, 1)
    schedule.stepped(0, left=0, ended=[0])
    assert schedule.clock == 3


def test_an_action_that_was_not_asked_for_is_refused():
    schedule = EngineSchedule(Terms(1, 2, 0, 3, 1, Costs(1, 0, 1)), 0)
    with pytest.raises(AssertionError, match="group 1 started, not 0"):
        schedule.admitted(1, 1)
    with pytest.raises(AssertionError, match="version 2 after 0"):
        schedule.switched(2)
