"""Which responses run where while more wait than run, as values."""

from __future__ import annotations

import random

import pytest

from bench.dealing import MEAN, Work, simulate
from rlhpc.rollout.dealing import Deal, EngineReport, Rules, deal
from rlhpc.rollout.schedule.response_order import ExpectedLengths, Unfinished

Place = tuple[int, int]


def expected(ratios: dict[int, float] | None = None) -> ExpectedLengths:
    return ExpectedLengths(lambda group: (ratios or {}).get(group, 1.0), 100.0)


def reports(*engines: list[Unfinished]) -> list[EngineReport]:
    return [EngineReport(tuple(one), ()) for one in engines]


def waiting(*places: Place) -> list[Unfinished]:
    return [Unfinished(place, 0, running=False) for place in places]


def running(*places: Place, tokens: int = 30) -> list[Unfinished]:
    return [Unfinished(place, tokens, running=True) for place in places]


def random_reports(draw: random.Random, slots: int) -> list[EngineReport]:
    found = []
    for engine in range(draw.randint(1, 6)):
        held = []
        for number in range(draw.randint(0, 4 * slots)):
            begun = number < slots and draw.random() < 0.8
            tokens = draw.randint(0, 900) if begun else draw.choice((0, 0, 700))
            held.append(Unfinished((10 * engine + number // 3, number % 3), tokens, running=begun))
        found.append(EngineReport(tuple(held), ()))
    return found


@pytest.mark.parametrize("turn", [None, 200])
@pytest.mark.parametrize("pinned", [False, True])
def test_every_response_is_on_one_engine_and_they_share_evenly(turn: int | None, pinned: bool) -> None:
    for seed in range(60):
        draw = random.Random(seed)
        slots = draw.randint(1, 5)
        given = random_reports(draw, slots)
        dealt = deal(given, Rules(slots, turn, pinned=pinned), expected())
        held = {one.place: (engine, one) for engine, report in enumerate(given) for one in report.unfinished}
        assert sorted(place for hand in dealt.engines for place in hand) == sorted(held)
        for engine, hand in enumerate(dealt.engines):
            for place in hand:
                before, one = held[place]
                begun = one.running or one.tokens > 0
                assert before == engine or not begun or (turn is not None and not pinned), "it has begun elsewhere"
        sizes = [len(hand) for hand in dealt.engines]
        begun = [sum(one.running or one.tokens > 0 for one in report.unfinished) for report in given]
        if turn is None or not pinned:  # else those that stay may all have had their turn
            assert max(sizes) <= max([-(-len(held) // len(given)), *(begun if turn is None else [])])
        assert dealt.waits == (max(sizes) > slots)


def test_what_runs_goes_on_and_the_longest_start_next() -> None:
    given = reports([*running((0, 0)), *waiting((1, 0), (2, 0))], [*running((3, 0)), *waiting((4, 0), (5, 0))])
    dealt = deal(given, Rules(slots=2), expected({1: 0.5, 2: 3.0, 4: 2.0, 5: 1.0}))
    assert dealt == Deal((((0, 0), (2, 0), (1, 0)), ((3, 0), (4, 0), (5, 0))), waits=True)


def test_an_engine_with_room_gets_what_waits_elsewhere() -> None:
    given = reports([*running((0, 0), (0, 1)), *waiting((1, 0), (1, 1))], [])
    dealt = deal(given, Rules(slots=2), expected())
    assert dealt == Deal((((0, 0), (0, 1)), ((1, 0), (1, 1))), waits=False)


def test_a_response_lets_others_run_once_it_has_had_its_turn() -> None:
    given = reports([*running((0, 0), tokens=120), *running((1, 0), tokens=60), *waiting((2, 0), (3, 0))])
    rules, ratios = Rules(slots=2, turn=100), {0: 9.0, 1: 0.1, 2: 1.0, 3: 2.0}
    assert deal(given, rules, expected(ratios)).engines == (((1, 0), (3, 0), (2, 0), (0, 0)),)


def test_lengths_are_expected_from_earlier_steps_and_from_the_group() -> None:
    lengths = expected({0: 0.5, 1: 2.0})
    assert lengths.of([0, 1, 2], {}) == {0: 50.0, 1: 200.0, 2: 100.0}
    lengths.note([(0, 300), (2, 100)])  # a mean of 200 in this step
    found = lengths.of([0, 1, 2], {1: [500]})
    assert found == {0: (2 * 100 + 300) / 3, 1: (2 * 400 + 500 + 200) / 3, 2: (2 * 200 + 100) / 3}


@pytest.mark.heavy
@pytest.mark.parametrize(("engines", "slots", "most"), [(2, 256, 1.4), (8, 16, 1.1), (64, 2, 1.1), (2, 1024, 1.05)])
def test_turns_end_near_the_bound(engines: int, slots: int, most: float) -> None:
    work = Work.drawn(0)
    bound = max(int(work.lengths.max()), work.lengths.sum() / (engines * slots))
    steps = {way: simulate(work, engines, slots, way, known=True).steps for way in ("equal", "longest_first", "turns")}
    assert steps["turns"] <= most * bound
    assert steps["turns"] <= steps["equal"]
    assert steps["longest_first"] <= steps["equal"]
    assert bound > MEAN, "not trivially small"
