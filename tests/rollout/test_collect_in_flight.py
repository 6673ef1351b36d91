"""Responses in flight while weights change, are written to a checkpoint, or make room for others.

With the engine of words of tests/rollout/test_collect.py; tests/rollout/test_in_flight.py has the real one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from rlhpc.api import Completion, RewardResult
from rlhpc.rollout.collect import Collector, Scored, Stepped
from rlhpc.rollout.requests import Sampling, blank_draft, request_seed, turns, with_sampled, with_tool_tokens
from tests.rollout.test_collect import SAMPLING, Calls, Counting, Words, completion, prompt, summary, task

TASKS = [task(number, index) for number in range(6) for index in range(3)]


class Versions(Words):
    """Also records the version that sampled each token, by seed and position."""

    def __init__(self) -> None:
        super().__init__()
        self.version, self.sampled, self.preempted = 6, {}, 0

    def step(self) -> list[tuple[int, Completion]]:
        for request, tokens in self.open.values():
            self.sampled[request.seed, len(request.prompt) + len(tokens)] = self.version
        return super().step()

    def settle(self) -> list[tuple[int, Completion]]:
        return []

    def order(self) -> list[int]:
        return list(self.open)

    def so_far(self, since: Mapping[int, int]) -> dict[int, Completion]:
        return {key: completion(self.open[key][1][first:], truncated=False) for key, first in since.items()}

    def preempt(self) -> None:
        self.preempted += 1


class OnDevice(Versions):
    """A step's results arrive with the next one."""

    def __init__(self) -> None:
        super().__init__()
        self.late: list[tuple[int, Completion]] = []

    def step(self) -> list[tuple[int, Completion]]:
        arrived, self.late = self.late, super().step()
        return arrived

    def settle(self) -> list[tuple[int, Completion]]:
        arrived, self.late = self.late, []
        return arrived


def collector(engine: Words, reward_workers: Counting | None = None) -> Collector:
    return Collector(engine, SAMPLING, reward_workers or Counting(), 6, Calls())


def run(running: Collector, steps: int = 10**6) -> list[Stepped]:
    """A schedule that answers calls two steps after they were made."""
    found, due = [], []
    while running.in_flight and len(found) < steps:
        if len(due) == 2 and (places := due.pop(0)):
            found.append(running.resume(places))
        found.append(running.step())
        due.append(found[-1].calls)
    return found


def whole() -> list[Scored]:
    running = collector(Versions())
    running.begin(TASKS)
    run(running)
    return running.harvest()


def switch(running: Collector, engine: Versions, version: int) -> Stepped:
    found = running.switch(version)
    engine.version = version
    return found


@pytest.mark.parametrize("kind", [Versions, OnDevice])
def test_each_token_has_the_version_that_sampled_it(kind):
    engine = kind()
    running = collector(engine)
    running.begin(TASKS)
    places: list = []
    for version in range(7, 40):
        for _ in range(3):
            places += running.step().calls
        places += switch(running, engine, version).calls
        running.resume(places[::2])
        places = places[1::2]
    assert not running.in_flight
    found = running.harvest()
    assert [summary(one) for one in found] == [summary(one) for one in whole()]
    several = 0
    for sample in (scored.sample for scored in found):
        root = (5, 2, sample.prompt_id, next(s.index for s in found if s.sample is sample))
        versions = np.full(sample.response_len, sample.policy_version)
        if sample.token_versions is not None:
            several += 1
            versions = sample.token_versions
            assert versions.dtype == np.int32
            assert versions.min() == sample.policy_version
        last = 0
        for place, version in enumerate(versions):
            if sample.response_mask is None or sample.response_mask[place]:
                last = engine.sampled[request_seed(root), sample.prompt_len + place]
            assert version == last
    assert several > 6


def test_a_step_reports_what_happened_in_it():
    running = collector(Versions())
    running.begin(TASKS)
    steps = run(running)
    assert sorted(group for step in steps for group in step.ended_groups) == list(range(6))
    calls = [place for step in steps for place in step.calls]
    assert calls
    turns_of = {(s.group, s.index): turns(s.sample) for s in running.harvest()}
    assert all(calls.count(place) >= turns - 1 for place, turns in turns_of.items())
    assert steps[0].requests == len(TASKS) > steps[-1].requests


@pytest.mark.parametrize("steps", [1, 3, 7])
def test_a_collector_restored_from_drafts_continues(steps):
    engine = Versions()
    first = collector(engine)
    first.begin(TASKS)
    run(first, steps)
    switch(first, engine, 7)
    drafts, done = first.drafts(), first.harvest()
    assert [draft.calls for draft in drafts] == sorted(draft.calls for draft in drafts)
    assert len(drafts) == first.in_flight == len(TASKS) - len(done)
    second = Collector(Versions(), SAMPLING, Counting(), 7, Calls())
    second.restore(drafts)
    assert second.drafts() == drafts
    waiting = [(draft.task.group, draft.task.index) for draft in drafts if draft.calls]
    second.resume(waiting)
    run(second)
    found = sorted((*done, *second.harvest()), key=lambda scored: (scored.group, scored.index))
    assert [summary(one) for one in found] == [summary(one) for one in whole()]
    assert second.ended_groups == 6 - first.ended_groups


def test_others_are_answered_alone_and_then_all_continue():
    engine = Versions()
    running = collector(engine)
    running.begin(TASKS)
    steps = run(running, 3)
    waiting = [place for step in steps for place in step.calls][-running.in_flight + running.requests :]
    drafts = running.drafts()
    running.set_aside()
    assert (running.in_flight, engine.open) == (0, {})
    others = [replace(task(9, index), group=-1, sampling=Sampling(3, 0.0, 1.0)) for index in range(9)]
    asked = len(engine.requests)
    running.begin(others)
    running.advance()
    assert {request.temperature for request in engine.requests[asked:]} == {0.0}
    answered = [scored for scored in running.harvest() if scored.group == -1]
    assert len(answered) == 9
    assert max(scored.sample.response_len for scored in answered) == 3
    running.take_up()
    assert engine.preempted == 1
    assert running.drafts() == drafts
    running.resume(waiting)
    run(running)
    tokens = {(s.group, s.index): s.sample.tokens.tolist() for s in running.harvest()}
    assert tokens.items() <= {(s.group, s.index): s.sample.tokens.tolist() for s in whole()}.items()


def test_next_turns_are_submitted_in_the_order_that_the_caller_gives():
    engine = Versions()
    running = collector(engine)
    running.begin(TASKS)
    places = running.step().calls
    while len(places) < 4:
        places += running.step().calls
    asked = len(engine.requests)
    running.resume(places[::-1])
    tasks = {request_seed(one.root): (one.group, one.index) for one in TASKS}
    assert [tasks[request.seed] for request in engine.requests[asked:]] == places[::-1]


def test_results_that_are_there_are_taken_without_waiting():
    class Late(Counting):
        def ready(self) -> dict[int, RewardResult]:
            key = min(self.waiting)
            return {key: self.waiting.pop(key)}

    running = collector(Versions(), Late())
    running.begin(TASKS)
    run(running)
    found = [*running.harvest(wait=False), *running.harvest(wait=False)]
    assert len(found) == 2
    found += running.harvest()
    assert sorted(map(summary, found)) == list(map(summary, whole()))


def test_a_resumed_response_of_a_partial_rollout_has_both_versions():
    first = with_sampled(blank_draft(prompt(1), 3), completion([5, 6], False), 4)
    assert first.token_versions is None
    assert with_sampled(first, completion([7], False), 4).token_versions is None
    assert with_tool_tokens(first, [7]).token_versions is None
    second = with_sampled(first, completion([7], False), 6)
    third = with_sampled(with_tool_tokens(second, [8, 9]), completion([7], False), 7)
    assert third.token_versions.tolist() == [4, 4, 6, 6, 6, 7]
    assert third.policy_version == 4
