"""Generators beside a stand-in for the trainers: who gets what, when, and again after a restart.

With the engine of words of tests/rollout/generator/worlds.py, in which every engine step leaves a trace.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rlhpc.config.schema import RunConfig
from rlhpc.rollout.collect import Collector
from rlhpc.rollout.generator.messages import StartPoint
from rlhpc.rollout.requests import Sampling, Task, blank_draft, first_samples
from tests.rollout.generator.words import SlowRewards, SlowTools, WordEngine
from tests.rollout.generator.worlds import (
    HELD_OUT,
    TURNS,
    Outcome,
    make_config,
    plain,
    policy_of,
    prompt_set,
    run_world,
    versions_of,
)

pytestmark = pytest.mark.heavy

SAVED = 3
LEND = {"placement": "lend", "asynchrony__costs__lend_seconds": 12.0}
CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {  # engines, options of the world, config
    "one engine": (1, {}, {}),
    "staleness 0": (2, {}, {"asynchrony__max_staleness": 0}),
    "staleness 2": (3, {}, {"asynchrony__max_staleness": 2}),
    "tools": (2, {"tools": True}, {}),
    "filter": (2, {}, {"train__dynamic_sampling": {}}),
    "tools, filter, greedy": (3, {"tools": True, "greedy": True}, {"train__dynamic_sampling": {}}),
    "keep": (2, {"tools": True}, {"asynchrony__in_flight": "keep"}),
    "results a step late": (2, {"tools": True, "delayed": True}, {"train__dynamic_sampling": {}}),
    "lend": (1, {"lenders": 2}, LEND),
    "lend at staleness 0": (2, {"lenders": 2}, {**LEND, "asynchrony__max_staleness": 0}),
    "lend, tools, filter, greedy": (
        2,
        {"lenders": 3, "tools": True, "greedy": True},
        {**LEND, "train__dynamic_sampling": {}},
    ),
    "lend, results a step late": (2, {"lenders": 2, "delayed": True}, LEND),
    "finish": (2, {"tools": True}, {"asynchrony__in_flight": "finish"}),
    "turns": (2, {"mean": 60}, TURNS),
    "turns, tools, filter, greedy, results a step late": (
        2,
        {"mean": 30, "tools": True, "greedy": True, "delayed": True},
        {**TURNS, "train__dynamic_sampling": {}, "asynchrony__max_staleness": 2},
    ),
    "turns, lend, results a step late": (2, {"mean": 60, "lenders": 2, "delayed": True}, {**LEND, **TURNS}),
}


def world(name: str, **options: Any) -> Outcome:
    engines, known, config = CASES[name]
    return run_world(make_config(**config), engines, **{**known, **options})


def saves(folder: Path, version: int) -> Mapping[str, Any]:
    """Decision to save at a version."""
    return {"checkpoint": str(folder)} if version == SAVED else {}


@pytest.mark.parametrize("name", CASES)
def test_every_prompt_is_delivered_once_within_the_bound(name: str) -> None:
    """``Trainers._check`` asserts the bound of every token of every step."""
    outcome = world(name)
    assert list(outcome.groups) != sorted(outcome.groups) or name == "one engine", "groups end out of order"
    assert set(outcome.times.values()) == {1}
    last = max(outcome.batches[-1])
    assert set(range(last + 1)) <= set(outcome.groups)
    kept = [number for batch in outcome.batches for number in batch]
    assert kept == [number for number in range(last + 1) if outcome.groups[number].keeps]
    assert [len(batch) for batch in outcome.batches] == [8] * 6
    if "dynamic_sampling" in str(CASES[name]):
        assert not all(group.keeps for group in outcome.groups.values())
    else:
        assert len(outcome.groups) == 48
    several = {len(set(versions_of(s))) for group in outcome.groups.values() for s in group.group.samples}
    assert (max(several) > 1) == (name != "finish" and not name.endswith("staleness 0"))


@pytest.mark.parametrize("name", ["staleness 2", "tools, filter, greedy", "lend, tools, filter, greedy"])
def test_how_late_anything_is_in_real_time_changes_nothing(name: str) -> None:
    first, second = world(name, seed=1), world(name, seed=2)
    trained = [number for batch in first.batches for number in batch]
    assert second.batches == first.batches
    assert [plain(second.groups[number]) for number in trained] == [plain(first.groups[number]) for number in trained]


@pytest.mark.parametrize("name", CASES)
def test_a_run_that_resumes_equals_one_that_does_not(name: str, tmp_path: Path) -> None:
    first = world(name, decide=partial(saves, tmp_path), seed=1)
    engines = CASES[name][0]
    assert sorted(first.written) == [(SAVED, engine) for engine in range(engines)]
    cursor = consumed(first, SAVED)
    again = world(name, start=StartPoint(SAVED, cursor, str(tmp_path)), seed=2)
    assert again.batches == first.batches[SAVED:]
    assert set(again.times.values()) == {1}
    assert min(again.groups) >= cursor, "what was trained on is not delivered again"
    for number in (number for batch in again.batches for number in batch):
        assert plain(again.groups[number]) == plain(first.groups[number])


@pytest.mark.parametrize("name", ["one engine", "tools, filter, greedy", "keep", "lend"])
@pytest.mark.parametrize("engines", [2, 4])
def test_a_run_that_resumes_with_other_engines_loses_no_prompt(name: str, engines: int, tmp_path: Path) -> None:
    first = world(name, decide=partial(saves, tmp_path))
    _, options, config = CASES[name]
    start = StartPoint(SAVED, consumed(first, SAVED), str(tmp_path))
    again = run_world(make_config(**config), engines, start=start, **options)
    assert set(again.times.values()) == {1}
    assert set(range(start.prompt_cursor, max(again.batches[-1]) + 1)) <= set(again.groups)
    assert [len(batch) for batch in again.batches] == [8] * 3
    drafts = [number for number, group in again.groups.items() if min_version(group) < policy_of(SAVED)]
    assert drafts, "some were in flight, and keep their tokens"
    for number in drafts:
        for old, new in zip(first.groups[number].group.samples, again.groups[number].group.samples, strict=True):
            count = sum(version < policy_of(SAVED) for version in versions_of(new))
            assert new.tokens[: new.prompt_len + count].tolist() == old.tokens[: new.prompt_len + count].tolist()


@pytest.mark.parametrize("name", ["tools", "keep"])
def test_a_run_begins_after_steps_in_another_placement(name: str) -> None:
    outcome = world(name, start=StartPoint(2, 16))
    assert [min(batch) for batch in outcome.batches] == [16, 24, 32, 40]
    assert outcome.groups[16].group.step == 2


@pytest.mark.parametrize("name", ["tools", "keep", "finish", "lend, tools, filter, greedy"])
def test_validation_runs_on_its_version_and_changes_no_group(name: str) -> None:
    """Also before the first step. Answers equal those that a collector of all prompts gets."""
    config = make_config(**CASES[name][2])
    outcome = world(name, decide=lambda version: {"validates": version in (0, 4)})
    quiet = world(name)
    assert sorted(outcome.validated) == [0, 4]
    for version, found in outcome.validated.items():
        answers = sorted(found, key=lambda scored: (scored.group, scored.index))
        assert [summary(scored) for scored in answers] == expected_answers(config, version)
        assert {scored.sample.policy_version for scored in found} == {policy_of(version)}
    assert outcome.batches == quiet.batches
    if name != "keep":  # requests lose the KV cache that they would have kept
        assert [plain(group) for _, group in sorted(outcome.groups.items())] == [
            plain(group) for _, group in sorted(quiet.groups.items())
        ]


def test_the_engines_end_with_the_version_that_ends_the_run(tmp_path: Path) -> None:
    def decide(version: int) -> Mapping[str, Any]:
        return {**saves(tmp_path, version), "ends": version == SAVED}

    outcome = world("tools", decide=decide)
    assert len(outcome.batches) == SAVED
    assert sorted(outcome.written) == [(SAVED, 0), (SAVED, 1)]


def test_groups_beyond_a_batch_that_closes_early_are_not_waited_for() -> None:
    """A batch closes at ``max_batches``, although it is not full: groups that have begun for it are left over."""
    changes = {"train__dynamic_sampling": {"max_batches": 1}, "asynchrony__max_staleness": 2}
    outcome = run_world(make_config(**changes), 2)
    assert [len(batch) < 8 for batch in outcome.batches] == [True] * 6
    assert set(range(48)) <= set(outcome.groups), "each step has a batch of prompts"


def test_a_state_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="No such file or directory"):
        world("one engine", decide=partial(saves, tmp_path / "gone"))


def test_groups_are_seeded_as_if_all_ranks_generated() -> None:
    outcome = world("staleness 2")
    prompts, seed = prompt_set(13), make_config().seed
    for step in range(6):
        ids = [prompt.prompt_id for prompt in prompts.take(8 * step, 8, seed)[0]]
        groups = [outcome.groups[number].group for number in range(8 * step, 8 * step + 8)]
        assert [group.prompt_id for group in groups] == ids
        assert [(group.step, group.first_sample) for group in groups] == [(step, n) for n in first_samples(ids, 3)]


def test_engines_report_what_they_did_and_waited_for() -> None:
    outcome = world("tools")
    activities = outcome.activity
    assert sum(activity.tokens for activity in activities) == sum(
        sample.sampled_len for group in outcome.groups.values() for sample in group.group.samples
    )
    assert sum(activity.steps for activity in activities) > 0
    assert all(0 <= activity.idle_seconds <= activity.seconds for activity in activities)
    assert {what for activity in activities for what in activity.idle} >= {"weights", "tools"}
    assert any("engine/running_requests_max" in activity.statistics for activity in activities)


def consumed(outcome: Outcome, version: int) -> int:
    """Prompt cursor of a version."""
    return max(outcome.batches[version - 1]) + 1


def min_version(group: Any) -> int:
    return min(version for sample in group.group.samples for version in versions_of(sample))


def summary(scored: Any) -> tuple[Any, ...]:
    return scored.group, scored.index, scored.sample.tokens.tolist(), scored.sample.group_id, scored.sample.reward


def expected_answers(config: RunConfig, version: int) -> list[tuple[Any, ...]]:
    """Answers to all held-out prompts on one engine."""
    engine, prompts = WordEngine(config.rollout.max_num_seqs), [p for _, p in prompt_set(HELD_OUT).first(None)]
    engine.awake, engine.version = ["weights", "cache"], version
    sampling = Sampling(config.rollout.max_response_tokens, 0.5, 1.0)
    collector = Collector(engine, sampling, SlowRewards(0), policy_of(version), SlowTools(0))  # type: ignore[arg-type]
    firsts = first_samples([prompt.prompt_id for prompt in prompts], 2)
    collector.begin(
        [
            Task(place, index, prompt, blank_draft(prompt, policy_of(version), place), root)
            for place, prompt in enumerate(prompts)
            for index in range(2)
            for root in [(config.seed, version, prompt.prompt_id, firsts[place] + index)]
        ]
    )
    collector.advance()
    return [summary(scored) for scored in collector.harvest()]
