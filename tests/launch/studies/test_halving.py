"""Successive halving: the best trials of a segment go on from where they are, each once, in spite of interruptions."""

from __future__ import annotations

import re
import time
from collections import Counter
from pathlib import Path

import pytest

from rlhpc.config.schema import RunConfig
from rlhpc.config.study import SegmentsSection
from rlhpc.core import attempts
from rlhpc.core.errors import UserError
from rlhpc.launch.studies.segments import in_order
from rlhpc.launch.studies.study_folder import StudyFolder
from rlhpc.launch.studies.trials_table import StudyTable, read_table
from tests.launch.studies.trial_stand_in import RATE, StandIn, advance, begin, finish, finish_interrupted, score

SEGMENTS = {"steps": [2, 4, 8], "keep": 0.334}
RATES = [1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3]  # 1e-3 is best


def begun(folder: Path, **fields: object) -> tuple[StudyFolder, StandIn]:
    """A study of a grid, whose trials get better with their steps as good ones do."""
    space = {RATE: {"choices": RATES}}
    known = {"space": space, "sampler": {"name": "GridSampler"}, "budget": {"trials": 6, "at_once": 2}, **fields}
    study, trials = begin(folder, segments=SEGMENTS, **known)
    trials.curve = lambda config, step: score(config) + step
    return study, trials


def check(found: StudyTable, trials: StandIn) -> None:
    """Six trials to step 2, two of them to step 4, and the best to step 8: each start once."""
    rates = {row.number: row.values[RATE] for row in found.rows}
    order = sorted(rates, key=lambda number: -found.rows[number].value)  # type: ignore[operator]
    assert [rates[number] for number in order[:2]] == [1e-3, rates[order[1]]]
    assert rates[order[1]] in (3e-4, 3e-3)
    expected = [f"search-{number} to 2" for number in rates]
    expected += [f"search-{number} again to 4" for number in order[:2]] + [f"search-{order[0]} again to 8"]
    assert Counter(trials.starts) == Counter(expected)
    assert Counter(row.state for row in found.rows) == {"complete": 1, "pruned": 5}
    assert found.best == order[0]
    assert sorted(row.value > 3 for row in found.rows) == [False] * 4 + [True] * 2  # type: ignore[operator]


def test_the_best_trials_of_each_segment_go_on_from_where_they_are(tmp_path: Path) -> None:
    folder, trials = begun(tmp_path)
    for _ in range(2):
        assert advance(folder, trials) == 2
    assert Counter(row.state for row in read_table(folder).rows) == {"waiting": 2, "running": 2}
    finish(folder, trials)
    check(read_table(folder), trials)


@pytest.mark.parametrize("moments", [r"trial 0: goes on to step 4", "."], ids=["in a decision", "all"])
def test_processes_that_end_anywhere_start_no_segment_twice_and_leave_none_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moments: str
) -> None:
    """Before each start, and between each two notes of a decision."""
    folder, trials = begun(tmp_path)
    seen = set[str]()

    def at_first(name: str) -> None:
        if re.match(moments, name) and name not in seen:
            seen.add(name)
            raise KeyboardInterrupt

    trials.before_start = lambda config: at_first(f"{config.name} {config.train.steps}")
    monkeypatch.setattr("rlhpc.launch.studies.advance.show", at_first)
    finish_interrupted(folder, trials)
    assert len(seen) >= (9 + 9 + 5 if moments == "." else 1)
    check(read_table(folder), trials)


def test_a_trial_that_fails_later_keeps_its_place_and_is_not_replaced(tmp_path: Path) -> None:
    folder, trials = begun(tmp_path)

    def outcome(config: RunConfig) -> float | str:
        return "user" if config.actor.optimizer.learning_rate == 1e-3 and config.train.steps == 4 else 1.0

    trials.outcome = outcome
    finish(folder, trials)
    states = {row.values[RATE]: row.state for row in read_table(folder).rows}
    assert states.pop(1e-3) == "failed"
    assert Counter(states.values()) == {"complete": 1, "pruned": 4}
    assert sum(start.endswith("to 4") for start in trials.starts) == 2


def test_a_segment_that_the_cluster_ends_is_submitted_again(tmp_path: Path) -> None:
    folder, trials = begun(tmp_path)

    def outcome(config: RunConfig) -> float | str:
        again = len(attempts.folders(folder.trial(int(config.name[-1])))) > 2
        return "bad_node" if config.train.steps == 4 and not again else 1.0

    trials.outcome = outcome
    finish(folder, trials)
    assert Counter(row.state for row in read_table(folder).rows) == {"complete": 1, "pruned": 5}
    assert sum(start.endswith("again to 4") for start in trials.starts) == 4


def test_a_trial_that_cannot_go_on_takes_the_place_of_no_other(tmp_path: Path) -> None:
    """Of those at one time: each advance starts a trial, to the last. It has cost a trial of the budget."""
    folder, trials = begun(tmp_path, sampler={"name": "RandomSampler"}, budget={"trials": 6, "at_once": 1})
    refused = set[str]()

    def refuse(config: RunConfig) -> None:
        if config.train.steps == 4 and refused <= {config.name}:
            refused.add(config.name)
            raise UserError("cannot work", where="train.steps")

    trials.refuse, advances = refuse, 0
    while advance(folder, trials):
        advances += 1
        assert len(trials.starts) == advances
    assert Counter(row.state for row in read_table(folder).rows) == {"infeasible": 1, "pruned": 4, "complete": 1}


def test_a_budget_that_is_used_up_leaves_no_trial_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, trials = begun(tmp_path, budget={"trials": 6, "at_once": 2, "hours": 1.0})
    advance(folder, trials)
    advance(folder, trials)
    later = time.time() + 3600
    monkeypatch.setattr(time, "time", lambda: later)
    assert advance(folder, trials) == 0
    assert {row.state for row in read_table(folder).rows} == {"failed"}


def test_a_share_of_the_steps_is_trained() -> None:
    segments = SegmentsSection(steps=(5, 15, 45), keep=1 / 3)
    assert segments.sizes(12) == [12, 4, 1]
    assert segments.share(12) == pytest.approx((12 * 5 + 4 * 10 + 1 * 30) / (12 * 45))
    assert SegmentsSection(steps=(1, 2), keep=0.1).sizes(3) == [3, 1]


def test_the_best_are_chosen_by_goal_and_number() -> None:
    values = {4: 1.0, 2: 3.0, 7: 1.0}
    assert in_order(values, "maximize") == [2, 4, 7]
    assert in_order(values, "minimize") == [4, 7, 2]
