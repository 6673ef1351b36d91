"""Generators in the order of arrival: every prompt once, within the bound, in any order of arrival; a resumed run loses
nothing; and a replay of the record is equal bit for bit.

With the engine of words of tests/rollout/generator/worlds.py, in which every engine step leaves a trace.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rlhpc.core.errors import UserError
from rlhpc.core.files import read_json, write_json
from rlhpc.core.folder import RunFolder
from rlhpc.rollout.generator.messages import StartPoint
from tests.rollout.generator.worlds import TURNS, Outcome, make_config, plain, run_world

pytestmark = pytest.mark.heavy

SAVED = 3
ARRIVAL = {"asynchrony__schedule": "arrival"}
CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {  # engines, options of the world, config
    "one engine": (1, {}, {}),
    "staleness 0": (2, {}, {"asynchrony__max_staleness": 0}),
    "staleness 2": (3, {}, {"asynchrony__max_staleness": 2}),
    "filter": (2, {}, {"train__dynamic_sampling": {}}),
    "filter at staleness 0": (3, {}, {"train__dynamic_sampling": {}, "asynchrony__max_staleness": 0}),
    "tools, filter, greedy": (3, {"tools": True, "greedy": True}, {"train__dynamic_sampling": {}}),
    "results a step late": (2, {"tools": True, "delayed": True}, {"train__dynamic_sampling": {}}),
    "finish": (2, {"tools": True}, {"asynchrony__in_flight": "finish"}),
    "turns, tools": (2, {"mean": 60, "tools": True}, TURNS),
}


def world(name: str, run: Path, attempt: int = 1, **options: Any) -> Outcome:
    """The outcome of an attempt of a run in the order of arrival."""
    engines, known, config = CASES[name]
    engines = options.pop("engines", engines)
    folder = RunFolder(run).attempt(attempt)
    folder.path.mkdir(parents=True)
    changes = {**ARRIVAL, **config, **options.pop("config", {})}
    return run_world(make_config(**changes), engines, attempt=folder, **{**known, **options})


def saves(folder: Path, version: int) -> Mapping[str, Any]:
    """Decision to save at a version."""
    return {"checkpoint": str(folder)} if version == SAVED else {}


def made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def trained(outcome: Outcome) -> list[int]:
    return [number for batch in outcome.batches for number in batch]


@pytest.mark.parametrize("name", CASES)
def test_every_prompt_is_trained_on_once_within_the_bound(name: str, tmp_path: Path) -> None:
    """``Trainers._check`` asserts the bound of every token of every step."""
    outcome = world(name, tmp_path)
    assert set(outcome.times.values()) == {1}
    numbers = trained(outcome)
    assert [len(batch) for batch in outcome.batches] == [8] * 6
    assert len(set(numbers)) == 48
    end, _ = outcome.places[-1]
    assert set(range(end)) <= {*numbers, *(number for number, group in outcome.groups.items() if not group.keeps)}
    if name == "staleness 2":
        assert numbers != sorted(numbers), "a later group was finished first"


@pytest.mark.parametrize("name", CASES)
def test_a_replay_equals_the_recorded_run(name: str, tmp_path: Path) -> None:
    first = world(name, tmp_path / "first", seed=1)
    again = world(name, tmp_path / "again", seed=2, config={"asynchrony__replay": str(tmp_path / "first")})
    assert again.batches == first.batches
    assert [plain(again.groups[number]) for number in trained(first)] == [
        plain(first.groups[number]) for number in trained(first)
    ]


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("name", ["staleness 2", "tools, filter, greedy", "turns, tools"])
def test_a_replay_of_a_resumed_run_equals_it(name: str, ends: bool, tmp_path: Path) -> None:
    """``ends``: the first attempt ends with the checkpoint, as at the end of a job's time."""
    run, folder = tmp_path / "run", made(tmp_path / "checkpoint")

    def decide(version: int) -> Mapping[str, Any]:
        found = saves(folder, version)
        return {**found, "ends": ends} if found else {}

    first = world(name, run, decide=decide, seed=1)
    cursor, arrival = first.places[SAVED - 1]
    start = StartPoint(SAVED, cursor, str(folder))
    again = world(name, run, 2, start=start, arrival=arrival, seed=2)
    straight = world(
        name,
        tmp_path / "replay",
        decide=partial(saves, made(tmp_path / "other")),
        config={"asynchrony__replay": str(run)},
    )
    assert straight.batches == [*first.batches[:SAVED], *again.batches]
    for number in trained(again):
        assert plain(again.groups[number]) == plain(straight.groups[number])


@pytest.mark.parametrize(("name", "engines"), [*((name, None) for name in CASES), ("staleness 2", 4), ("filter", 4)])
def test_a_resumed_run_loses_no_prompt(name: str, engines: int | None, tmp_path: Path) -> None:
    folder = made(tmp_path / "checkpoint")
    first = world(name, tmp_path / "run", decide=partial(saves, folder))
    cursor, arrival = first.places[SAVED - 1]
    start = StartPoint(SAVED, cursor, str(folder))
    more = {} if engines is None else {"engines": engines}
    again = world(name, tmp_path / "run", 2, start=start, arrival=arrival, seed=3, **more)
    done = {number for batch in first.batches[:SAVED] for number in batch}
    assert not done & set(trained(again))
    assert [len(batch) for batch in again.batches] == [8] * 3
    assert len({*done, *trained(again)}) == 48
    end, _ = again.places[-1]
    dropped = {number for one in (first, again) for number, group in one.groups.items() if not group.keeps}
    assert set(range(end)) <= {*done, *trained(again), *dropped}


def test_calls_that_only_the_next_step_reports_are_answered_once(tmp_path: Path) -> None:
    """Calls of tools that begin with the step in flight at a switch, which a real device makes a matter of chance."""
    name = "results a step late"
    for seed in range(50):
        run, folder = tmp_path / f"run-{seed}", made(tmp_path / f"checkpoint-{seed}")
        first = world(name, run, decide=partial(saves, folder), seed=seed)
        if _calls_as_late(folder):
            break
    else:
        pytest.fail("no call of tools was in progress")
    cursor, arrival = first.places[SAVED - 1]
    again = world(name, run, 2, start=StartPoint(SAVED, cursor, str(folder)), arrival=arrival)
    assert [len(batch) for batch in again.batches] == [8] * 3
    assert not {*trained(again)} & {number for batch in first.batches[:SAVED] for number in batch}


def _calls_as_late(checkpoint: Path) -> int:
    """Changes a checkpoint as if all calls of tools in progress had begun with the step in flight; their number."""
    count = 0
    for file in checkpoint.rglob("*.json"):
        state = read_json(file)
        late = [[response["group"], response["index"]] for response in state["in_flight"] if response["calls"]]
        write_json(file, {**state, "late_calls": late})
        count += len(late)
    return count


def test_a_record_in_other_hands_is_refused(tmp_path: Path) -> None:
    world("one engine", tmp_path / "first")
    with pytest.raises(UserError, match="has no record of step 7"):
        world(
            "one engine", tmp_path / "longer", config={"asynchrony__replay": str(tmp_path / "first"), "train__steps": 8}
        )
    with pytest.raises(UserError, match="has no record of its generation"):
        world("one engine", tmp_path / "other", config={"asynchrony__replay": str(tmp_path / "nothing")})


def test_virtual_time_does_not_go_on_with_an_order_of_arrival(tmp_path: Path) -> None:
    folder, virtual = made(tmp_path / "checkpoint"), {"asynchrony__schedule": "deterministic"}
    first = world("staleness 2", tmp_path / "run", decide=partial(saves, folder))
    start = StartPoint(SAVED, first.places[SAVED - 1][0], str(folder))
    with pytest.raises(UserError, match="deterministic, but the checkpoint's groups were begun"):
        world("staleness 2", tmp_path / "other", start=start, config=virtual)


def test_an_order_of_arrival_goes_on_with_virtual_time(tmp_path: Path) -> None:
    folder, virtual = made(tmp_path / "checkpoint"), {"asynchrony__schedule": "deterministic"}
    first = world("staleness 2", tmp_path / "run", decide=partial(saves, folder), config=virtual)
    start = StartPoint(SAVED, first.places[SAVED - 1][0], str(folder))
    again = world("staleness 2", tmp_path / "other", start=start)
    done = [number for batch in first.batches[:SAVED] for number in batch]
    assert sorted([*done, *trained(again)]) == list(range(48))
