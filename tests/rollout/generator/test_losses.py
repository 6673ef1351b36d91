"""Engines that are lost while they generate, and come back: every prompt is trained on once, within the bound."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rlhpc.core.folder import RunFolder
from rlhpc.rollout.generator.record import read_record
from tests.rollout.generator.losses import Losses, LossyWorld, Survived
from tests.rollout.generator.worlds import TURNS, make_config, plain, policy_of, versions_of

pytestmark = pytest.mark.heavy

CASES: dict[str, dict[str, Any]] = {
    "virtual time": {},
    "virtual time, staleness 0": {"asynchrony__max_staleness": 0},
    "virtual time, filter": {"train__dynamic_sampling": {}},
    "arrival": {"asynchrony__schedule": "arrival"},
    "arrival, staleness 0": {"asynchrony__schedule": "arrival", "asynchrony__max_staleness": 0},
    "arrival, staleness 2, filter": {
        "asynchrony__schedule": "arrival",
        "asynchrony__max_staleness": 2,
        "train__dynamic_sampling": {},
    },
    "arrival, staleness 0, filter": {
        "asynchrony__schedule": "arrival",
        "asynchrony__max_staleness": 0,
        "train__dynamic_sampling": {},
    },
}


def survive(name: str, run: Path, losses: Losses, engines: int = 3, **options: Any) -> Survived:
    return lossy(name, run, losses, engines, **options.pop("config", {})).run(**options)


def lossy(name: str, run: Path, losses: Losses, engines: int = 3, **config: Any) -> LossyWorld:
    folder = RunFolder(run).attempt(1)
    folder.path.mkdir(parents=True)
    changes = {"recovery__lost_engines": "rejoin", **CASES[name], **config}
    return LossyWorld(make_config(**changes), engines, folder, losses)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("step", "unsent"), [(1, 0), (23, 1), (47, 0)])
def test_every_prompt_is_trained_on_once_without_an_engine(name: str, step: int, unsent: int, tmp_path: Path) -> None:
    survived = survive(name, tmp_path, Losses({1: step}, unsent=unsent, seed=step))
    assert survived.lost == [1]
    check(name, survived)


@pytest.mark.parametrize("name", CASES)
def test_engines_come_back_and_are_lost_again(name: str, tmp_path: Path) -> None:
    survived = survive(name, tmp_path, Losses({0: 31, 2: 40}, back=(0, 2), unsent=1))
    assert sorted(survived.lost) == sorted(survived.joined) == [0, 2]
    check(name, survived)


@pytest.mark.parametrize("name", ["virtual time", "arrival, staleness 0"])
def test_a_run_waits_for_its_only_engine(name: str, tmp_path: Path) -> None:
    survived = survive(name, tmp_path, Losses({0: 30}, back=(0,)), engines=1)
    assert survived.joined == [0]
    check(name, survived)


def test_a_validation_goes_on_with_the_engines_that_are_left(tmp_path: Path) -> None:
    survived = survive("arrival", tmp_path, Losses({1: 30}), validates=(6,))
    assert survived.answers == {6: 10}


@pytest.mark.parametrize("name", ["arrival", "arrival, staleness 2, filter"])
def test_an_engine_that_holds_up_the_trainers_is_lost_and_comes_back(name: str, tmp_path: Path) -> None:
    losses = Losses(back=(1,), slow={1: 0.3}, limit=0.5)
    world = lossy(name, tmp_path, losses)
    survived = world.run()
    assert world.given_up == {"1": [0, "held up the trainers for recovery.slow_engine_seconds"]}
    assert survived.joined in ([], [1]), "the run may end before it is back"
    check(name, survived)


def test_a_slow_engine_gets_fewer_groups_and_is_named(tmp_path: Path) -> None:
    world = lossy("arrival", tmp_path, Losses(slow={1: 0.02}))
    survived = world.run()
    assert survived.lost == []
    check("arrival", survived)
    batches = read_record(RunFolder(tmp_path)).batches.values()
    groups = Counter(engine for batch in batches for engine, _ in batch.sources.values())
    assert 0 < groups[1] < groups[0] / 1.2
    metrics = world.desk.metrics()
    assert metrics["rollout/held_up_engine"] == 1
    assert metrics["rollout/held_up_seconds"] > 0.05


def check(name: str, survived: Survived) -> None:
    assert [len(batch.kept) for batch in survived.batches] == [8] * 6
    assert set(survived.times.values()) == {1}
    for one in survived.groups.values():  # seeded by the version with which it began, which a replay repeats
        assert all(policy_of(one.group.step) <= min(versions_of(sample)) for sample in one.group.samples)
    done = {one.number for batch in survived.batches for one in (*batch.kept, *batch.dropped)}
    assert set(range(survived.batches[-1].end)) <= done
    assert ("filter" in name) == (len(done) > 48)


@pytest.mark.parametrize("name", [*CASES, "virtual time, turns", "arrival, turns"])
def test_a_replay_of_a_run_with_losses_equals_it(name: str, tmp_path: Path) -> None:
    name, turns, _ = name.partition(", turns")
    changes = TURNS if turns else {}
    first = survive(name, tmp_path / "first", Losses({0: 31, 2: 40}, back=(0, 2), unsent=1, seed=1), config=changes)
    replay = {**changes, "asynchrony__replay": str(tmp_path / "first")}
    again = survive(name, tmp_path / "again", Losses(seed=2), config=replay)
    for ours, theirs in zip(again.batches, first.batches, strict=True):
        assert [plain(one) for one in ours.kept] == [plain(one) for one in theirs.kept]


@pytest.mark.parametrize(("lost", "engines"), [(0, 3), (1, 3), (0, 2)])
def test_a_checkpoint_without_a_lost_engine_s_part_loses_no_prompt(lost: int, engines: int, tmp_path: Path) -> None:
    """Neither on as many engines as before nor on fewer."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    first = survive("arrival", tmp_path / "first", Losses({lost: 23}, unsent=1), saves={3: folder})
    assert first.lost == [lost]
    again = survive("arrival", tmp_path / "again", Losses(seed=2), engines, resumed=first.saved[3])
    assert [len(batch.kept) for batch in again.batches] == [8] * 3
    before = [one.number for batch in first.batches[:3] for one in batch.kept]
    assert sorted([*before, *again.times.elements()]) == list(range(48))
