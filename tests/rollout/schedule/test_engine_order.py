"""In which order one engine runs its responses, as values."""

from __future__ import annotations

import pytest

from rlhpc.rollout.schedule.engine_order import EngineOrder
from rlhpc.rollout.schedule.generation_load import ModelEngine
from rlhpc.rollout.schedule.response_order import Dealing, Unfinished

Place = tuple[int, int]
MEAN = 400.0  # a deal every 100 steps, turns of 200 tokens


def order_of(dealing: Dealing, ratios: dict[int, float] | None = None, first: int = 0) -> EngineOrder:
    """With two groups in a step."""
    order = EngineOrder(dealing, 2)
    order.switch(MEAN, ratios, first)
    return order


def waiting(*places: Place, tokens: int = 0) -> list[Unfinished]:
    return [Unfinished(place, tokens, running=False) for place in places]


def running(*places: Place, tokens: int = 30) -> list[Unfinished]:
    return [Unfinished(place, tokens, running=True) for place in places]


def test_what_runs_goes_on_and_the_longest_of_the_others_are_next() -> None:
    order = order_of("longest_first", {0: 3.0, 1: 0.5, 2: 4.0, 3: 5.0})
    responses = [*waiting((1, 0), (2, 0), (0, 0)), *running((3, 0)), *waiting((0, 1), tokens=9)]
    assert order.ordered(responses) == [(3, 0), (0, 1), (0, 0), (1, 0), (2, 0)]


def test_those_with_the_fewest_turns_run_but_those_of_earlier_steps_before() -> None:
    order = order_of("turns", first=1)
    responses = [*running((1, 0), tokens=450), *waiting((2, 0), tokens=250), *running((3, 0), tokens=50)]
    assert order.ordered([*responses, *waiting((4, 0))]) == [(2, 0), (1, 0), (3, 0), (4, 0)]


@pytest.mark.parametrize(("dealing", "own"), [("longest_first", False), ("turns", True)])
def test_a_deal_is_due_after_each_switch_and_then_at_fixed_numbers_of_steps(dealing: Dealing, own: bool) -> None:
    """``own``: also if those that wait are of one group."""
    order = order_of(dealing)
    due = []
    for step in range(250):
        if order.is_due([1, 2]):
            due.append(step)
        assert order.is_due([1, 1]) == (own and order.is_due([1, 2]))
        assert not order.is_due([])
        order.stepped()
    assert due == [0, 100, 200]
    order.switch(MEAN)
    assert order.is_due([1, 2])


def test_lengths_of_groups_that_were_trained_on_are_forgotten() -> None:
    """The others' remain, which a resumed run notes again."""
    order = order_of("longest_first")
    order.note([(0, 900), (2, 900), (3, 5000), (4, 100)])
    order.switch(MEAN, {}, 2, done=[3])
    again = order_of("longest_first", first=2)
    again.note([(4, 100), (2, 900)])
    responses = waiting((3, 0), (4, 0), (5, 0), (2, 0), (7, 0))
    assert order.ordered(responses) == again.ordered(responses)
    assert order.ordered(waiting((4, 0), (5, 0))) == [(5, 0), (4, 0)], "its own group's responses were short"
    order.restart()
    order.switch(MEAN)
    assert order.ordered(waiting((4, 0), (5, 0))) == [(4, 0), (5, 0)]


def test_simulated_responses_take_turns() -> None:
    engine, order = ModelEngine(2), order_of("turns")
    engine.admit(0, [700, 700, 100])
    again = []
    for _ in range(7):
        again.append(engine.arrange(order))
        order.stepped(100)
        engine.advance(100)
    assert again == [0, 0, 200, 0, 0, 0, 0], "one lets the third run, whose place it has when that has ended"
    assert (engine.requests, engine.generated) == (1, 600)
