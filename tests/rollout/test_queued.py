"""Responses that have no place in an engine yet. The engine is that of test_collect.py: one without a model."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from rlhpc.api import Completion
from rlhpc.rollout.queued import QueuedCollector
from rlhpc.rollout.schedule.response_order import Unfinished
from tests.rollout.test_collect import SAMPLING, Calls, Counting, Words, collect, completion, summary, task


class Paused(Words):
    """It can be asked what requests have so far."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: list[int] = []

    def step(self) -> list[tuple[int, Completion]]:
        self.ran.append(len(self.open))
        return super().step()

    def settle(self) -> list[tuple[int, Completion]]:
        return []

    def so_far(self, since: Mapping[int, int]) -> dict[int, Completion]:
        return {key: completion(self.open[key][1][first:], truncated=False) for key, first in since.items()}


def queue(slots: int, dialogue: Calls | None = None) -> tuple[QueuedCollector, Paused]:
    engine = Paused()
    return QueuedCollector(engine, SAMPLING, Counting(), 6, dialogue, slots=slots), engine  # type: ignore[arg-type]


def test_no_more_run_than_have_a_place_and_nothing_changes() -> None:
    tasks = [task(group, index) for group in range(6) for index in range(3)]
    collector, engine = queue(4)
    collector.begin(tasks)
    left = []
    while collector.in_flight:
        left.append(collector.in_flight)
        collector.step()
    assert engine.ran == [min(4, number) for number in left]
    assert [summary(scored) for scored in collector.harvest()] == collect(tasks)
    assert collector.ended_groups == 6


def test_with_tools_too() -> None:
    tasks = [task(group, index) for group in range(6) for index in range(3)]
    collector, _ = queue(2, Calls(delay=2))
    collector.begin(tasks)
    while collector.in_flight:
        collector.run(3, takes_replies=True)
        collector.advance(1)
    assert [summary(scored) for scored in collector.harvest()] == collect(tasks, Calls(delay=2))


@pytest.mark.parametrize("delay", [0, 1, 5])
def test_what_is_finished_need_not_depend_on_the_time_of_tools(delay: int) -> None:
    found = finished_at(delay)
    assert any(found)
    assert found == finished_at(0), "as with tools that answer at once"


def finished_at(delay: int) -> list[list[tuple[tuple[int, int], int]]]:
    collector, _ = queue(4, Calls(delay=delay))
    collector.begin([task(group, index) for group in range(6) for index in range(3)])
    found = []
    for _ in range(4):
        collector.run(6, takes_replies=False)
        collector.advance(0)
        found.append([(one.place, one.tokens) for one in collector.report(tokens=True).unfinished])
    return found


def test_it_reports_what_runs_what_waits_and_what_has_ended() -> None:
    collector, _ = queue(2)
    collector.begin([task(0), task(1), task(2)])
    assert collector.report(tokens=False).unfinished == tuple(Unfinished((n, 0), 0, running=False) for n in range(3))
    collector.run(1, takes_replies=True)
    for exact in (False, True):
        held = {one.place: one for one in collector.report(tokens=exact).unfinished}
        assert all(one.tokens == one.running for one in held.values()), held
    collector.run(50, takes_replies=True)
    ended = dict(collector.report(tokens=False).ended)
    lengths = {(scored.group, scored.index): scored.sample.response_len for scored in collector.harvest()}
    assert ended.keys() <= lengths.keys()
    assert all(lengths[place] == length for place, length in ended.items())
    assert collector.report(tokens=False).ended == (), "each once"


def test_responses_go_on_elsewhere_with_what_they_have() -> None:
    tasks = [task(group, index) for group in range(4) for index in range(2)]
    one, first = queue(3)
    other, second = queue(3)
    one.begin(tasks)
    one.run(2, takes_replies=True)
    places = [unfinished.place for unfinished in one.report(tokens=True).unfinished]
    running = [place for place in places if place in {(t.group, t.index) for t in one.tasks.values()}]
    moving = [running[0], places[-1]]
    moved = one.withdraw(moving)
    assert sorted((t.group, t.index) for t in moved) == sorted(moving)
    assert {len(t.draft.tokens) - t.draft.prompt_len for t in moved} == {0, 2}
    stay = [place for place in reversed(places) if place not in moving]
    one.arrange(stay, [])
    other.arrange(moving, moved)
    assert {(t.group, t.index) for t in one.tasks.values()} <= set(stay[:3]), "the first of the order run"
    assert [(t.group, t.index) for t in one.waiting if (t.group, t.index) in stay[3:]] == stay[3:]
    for collector in (one, other):
        collector.advance()
    found = [*one.harvest(), *other.harvest()]
    assert sorted(summary(scored) for scored in found) == sorted(collect(tasks))
    assert not first.open
    assert not second.open


def test_what_never_ran_stops_as_it_came() -> None:
    collector, _ = queue(1)
    collector.begin([task(0), task(1), task(2)])
    collector.run(1, takes_replies=True)
    collector.harvest()
    stopped = {(scored.group, scored.index): scored.sample.response_len for scored in collector.stop()}
    assert stopped.keys() >= {(1, 0), (2, 0)}
    assert stopped[2, 0] == 0
    assert collector.in_flight == 0
