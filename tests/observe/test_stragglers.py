"""The slow rank is named, by busy time per token: rules on values, and real ranks of which one is slower."""

from __future__ import annotations

import gzip
import json
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from rlhpc.core import env, spans
from rlhpc.observe.metrics import Stopwatch
from rlhpc.observe.phases import Load, Straggler, Stragglers, load_numbers, loads_of, slowness, span_numbers, spans_of
from rlhpc.observe.rank_numbers import RankNumbers
from rlhpc.parallel.waits import measure_waits
from tests.helpers.distributed import run_ranks

WORK = 0.15  # seconds of a healthy rank's phase


def load(busy: float, tokens: float = 1024.0, rounds: float = 0.0) -> Load:
    return Load(busy, tokens, rounds)


def named(rows: list[list[float]], seconds: float = 60.0, window: float = 120.0, ranks: int = 3) -> list[int | None]:
    """Rank that is named after each step, by the busy times of its ranks."""
    found = Stragglers([0] * ranks, window)
    results = [found.add({"update": [load(busy) for busy in row]}, seconds) for row in rows]
    return [result.rank if result else None for result in results]


def test_a_rank_that_takes_30_percent_longer_is_named_after_5_steps() -> None:
    assert named([[1.0, 1.3, 1.01]] * 6) == [None] * 4 + [1, 1]
    # After healthy steps: within 5 of its own, and no longer once it is well again.
    slow = named([[1.0, 1.0, 1.0]] * 5 + [[1.0, 1.0, 1.3]] * 5 + [[1.0, 1.0, 1.0]] * 3)
    assert slow.index(2) < 10
    assert slow[-1] is None


def test_steps_that_are_short_are_merged_until_minutes_have_passed() -> None:
    slow = named([[1.0, 1.3, 1.0]] * 130, seconds=1.0)
    assert slow.index(1) == 119
    assert set(slow[119:]) == {1}


def test_noise_names_nobody() -> None:
    assert set(named([[1.0, 1.19, 1.0]] * 20)) == {None}, "less than 20%"
    assert set(named([[1.0, 3.0, 1.0], [1.0, 1.0, 1.0]] * 10)) == {None}, "every other step"
    assert set(named([[1.0, 2.0, 1.0], [2.0, 1.0, 1.0], [1.0, 1.0, 2.0]] * 7)) == {None}, "another rank each time"
    assert set(named([[1.0, 1.0, 1.0], [9.0, 1.0, 1.0]] + [[1.0, 1.0, 1.0]] * 18)) == {None}, "one long step"


def test_more_tokens_are_not_a_slow_rank() -> None:
    found = Stragglers([0, 0], 0.0)
    for _ in range(6):
        assert found.add({"update": [load(2.0, tokens=2048), load(1.0)]}, 60.0) is None


def test_stages_are_compared_with_their_own() -> None:
    """Four ranks in two pipeline stages, the second of which has the head and takes longer."""
    assert slowness([load(1.0), load(2.0), load(1.0), load(3.0)], [0, 1, 0, 1]) == [1.0, 2 / 3, 1.0, 1.5]
    assert all(ratio != ratio for ratio in slowness([load(1.0), load(2.0)], [0, 1])), "nobody to compare with"


def test_an_engine_is_slow_only_if_its_rounds_are() -> None:
    few_tokens = [load(1.0, tokens=512, rounds=128), load(1.0, tokens=1024, rounds=128)]
    assert max(slowness(few_tokens, [0, 0])) == 1.0
    slow = [load(1.3, tokens=1024, rounds=128), load(1.0, tokens=1024, rounds=128)]
    assert slowness(slow, [0, 1])[0] == 1.3, "engines have no stages"
    long_tail = [load(3.0, tokens=1024, rounds=384), load(1.0, tokens=1024, rounds=128)]
    assert max(slowness(long_tail, [0, 0])) == 1.0


def test_among_many_ranks_the_median_is_of_all() -> None:
    ratios = slowness([load(1.0)] * 1023 + [load(1.3)], [0] * 1024)
    assert ratios[-1] == 1.3
    assert set(ratios[:-1]) == {1.0}


def test_ranks_without_work_have_no_part() -> None:
    found = Stragglers([0, 0, 0], 0.0)
    rows = [load(1.0), load(0.0, tokens=0), load(1.3)]
    results = [found.add({"update": rows}, 1.0) for _ in range(5)]
    assert results[-1] == Straggler(2, "update", 1.3)


def _steps_of_a_rank(slow: int) -> tuple[list[int], list[list[float]]]:
    """Stragglers that this rank finds in its steps, and waits of all ranks in the last one. Rank ``slow`` takes 30%
    longer from the fourth step on."""
    measure_waits()
    rank, ranks = int(os.environ[env.RANK]), dist.get_world_size()
    numbers, found = RankNumbers(), Stragglers([0] * ranks, 5 * WORK)
    record, named = spans.take(), []
    numbers.add("loads", lambda: load_numbers(record), ())
    numbers.add("spans", lambda: span_numbers(record, began), ())
    for step in range(9):
        began = time.perf_counter()
        with Stopwatch()("update"):
            spans.worked(1000)
            time.sleep(WORK * (1.3 if rank == slow and step >= 3 else 1.0))
            dist.all_reduce(torch.ones(10))
        record = spans.take()
        gathered = numbers.gather()
        straggler = found.add(loads_of(gathered), time.perf_counter() - began)
        named.append(straggler.rank if straggler else -1)
    return named, [[span.wait for span in spans] for spans in spans_of(gathered)]


@pytest.mark.ranks
def test_a_slow_rank_of_a_real_group_is_named_within_5_steps() -> None:
    for named, waits in run_ranks(_steps_of_a_rank, 4, 2):
        assert named[:3] == [-1] * 3
        assert named[8] == 2, "the fifth step"
        assert set(named) <= {-1, 2}
        assert waits[2][0] < 0.5 * min(waits[rank][0] for rank in (0, 1, 3)), "the others wait for it"


def recorded(seed: int) -> list[tuple[float, dict[str, list[Load]]]]:
    """Seconds and loads of the steps of a short demo on two ranks, recorded beside busy neighbours."""
    file = Path(__file__).parents[1] / "golden" / "loads" / f"demo-seed-{seed}.jsonl.gz"
    rows = [json.loads(line) for line in gzip.decompress(file.read_bytes()).splitlines()]
    return [
        (seconds, {phase: [Load(*one) for one in both] for phase, both in loads.items()}) for seconds, loads in rows
    ]


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(("window", "most"), [(5.0, 10.0), (20.0, 25.0)])
def test_in_the_demo_nobody_is_named_but_a_planted_straggler(seed: int, window: float, most: float) -> None:
    """``most``: seconds until it is named: six blocks, if it began within one; blocks of a second are noisy."""
    steps, healthy, planted = recorded(seed), Stragglers([0, 0], window), Stragglers([0, 0], window)
    slow, named = 0.0, []
    for place, (seconds, loads) in enumerate(steps):
        assert healthy.add(loads, seconds) is None
        if place >= 60:  # the first step of RL
            slow += seconds
            loads = {phase: [one, replace(two, busy=1.3 * two.busy)] for phase, (one, two) in loads.items()}
        found = planted.add(loads, seconds)
        named += [(found.rank, slow)] if found else []
    rank, after = named[0]
    assert rank == 1
    assert after <= most
