"""Responses of an engine with ranks of its own wait outside it, and run in the order of ``EngineOrder``."""

from __future__ import annotations

from typing import Any

import pytest

from rlhpc.rollout.generator.messages import Published
from rlhpc.rollout.generator.ordered import OrderedCollector
from rlhpc.rollout.requests import Sampling, Task, blank_draft
from rlhpc.rollout.schedule.engine_order import EngineOrder
from rlhpc.rollout.schedule.generation_load import ModelEngine
from rlhpc.rollout.schedule.response_order import Dealing, Unfinished
from tests.rollout.generator.test_loop import LEND
from tests.rollout.generator.words import SlowRewards, WordEngine
from tests.rollout.generator.worlds import TURNS, Outcome, make_config, plain, prompt_set, run_world

pytestmark = pytest.mark.heavy

SLOTS, MEAN, MOST = 4, 60, 200


def world(dealing: Dealing, lenders: int = 0, **config: Any) -> Outcome:
    return run_world(make_config(**{**TURNS, **config, "rollout__dealing": dealing}), 2, mean=MEAN, lenders=lenders)


def plain_groups(outcome: Outcome) -> list[Any]:
    return [plain(outcome.groups[number]) for batch in outcome.batches for number in batch]


@pytest.mark.parametrize("staleness", [0, 2])
def test_without_lenders_and_tools_only_turns_change_what_runs_beside_what(staleness: int) -> None:
    """An engine starts a group when it has a free slot: those that wait are of one group, of which the same is
    expected. Each token's log-prob names what ran beside it."""
    equal, longest, turns = (
        plain_groups(world(dealing, asynchrony__max_staleness=staleness))
        for dealing in ("equal", "longest_first", "turns")
    )
    assert longest == equal
    assert turns != equal


def test_requests_that_lenders_return_run_in_another_order() -> None:
    lend = {**LEND, "asynchrony__costs__lend_seconds": 60.0}
    assert plain_groups(world("longest_first", lenders=4, **lend)) != plain_groups(world("equal", lenders=4, **lend))


@pytest.mark.parametrize("dealing", ["longest_first", "turns"])
def test_simulated_engines_run_the_same_responses(dealing: Dealing) -> None:
    """Groups end at the same steps in the simulator as with the collector."""
    ends, lengths = collected(dealing)
    engine, order, found = ModelEngine(SLOTS), order_of(dealing), []
    order.switch(MEAN, {2: 3.0}, 0)
    groups = sorted(lengths)
    while groups or engine.requests:
        while groups and engine.requests < 2 * SLOTS:
            group = groups.pop(0)
            engine.admit(group, lengths[group])
        engine.arrange(order)
        order.stepped()
        found += [(engine.steps, group) for group in engine.advance(1)]
    assert found == ends
    other: Dealing = "turns" if dealing == "longest_first" else "longest_first"
    assert ends != collected(other)[0], "the way of dealing matters"


def test_what_an_engine_has_no_more_is_forgotten() -> None:
    """At a switch what was trained on, out of order too; all when it gives up its groups, as one that begins."""
    order, new = order_of("turns"), order_of("turns")
    collector = collector_of(order)
    waiting = [Unfinished((group, 0), 0, running=False) for group in (6, 7)]
    order.note([(5, 10), (6, 500)])
    collector.expect(Published(1, 1, 4, mean_tokens=MEAN, done=(6,)))
    new.switch(MEAN)
    assert order.ordered(waiting) == [(6, 0), (7, 0)] == new.ordered(waiting)
    order.note([(7, 500), (5, 10)])
    assert order.ordered(waiting) == [(7, 0), (6, 0)]
    collector.deal()
    collector.forget_calls()
    assert order.until_due == 0
    assert order.ordered(waiting) == new.ordered(waiting)


def collected(dealing: Dealing) -> tuple[list[tuple[int, int]], dict[int, list[int]]]:
    """(engine steps so far, group) of each group's end, and lengths by group. More groups are there than run."""
    collector = collector_of(order_of(dealing))
    groups, prompts, ends, step = [*range(8)], prompt_set(8).prompts, list[tuple[int, int]](), 0
    while groups or collector.requests:
        while groups and collector.requests < 2 * SLOTS:
            group = groups.pop(0)
            blank = blank_draft(prompts[group], 0)
            collector.begin([Task(group, index, prompts[group], blank, (0, 0, group, index)) for index in range(3)])
        collector.deal()
        step += 1
        ends += [(step, group) for group in collector.step().ended_groups]
    lengths: dict[int, list[int]] = {}
    for scored in collector.harvest():  # in the order of their places
        lengths.setdefault(scored.group, []).append(scored.sample.sampled_len)
    return ends, lengths


def collector_of(order: EngineOrder) -> OrderedCollector:
    engine = WordEngine(SLOTS, mean=MEAN)
    engine.version, engine.awake = 0, ["weights", "cache"]
    arguments: tuple[Any, ...] = (engine, Sampling(MOST, 0.9, 1.0), SlowRewards(0), 0, None)
    collector = OrderedCollector(*arguments, slots=SLOTS, order=order)
    collector.expect(Published(0, 0, 0, mean_tokens=MEAN, length_ratios=((2, 3.0),)))
    return collector


def order_of(dealing: Dealing) -> EngineOrder:
    return EngineOrder(dealing, 4)
