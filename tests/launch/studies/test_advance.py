"""A study counts each trial once, in spite of interruptions; it learns what cannot work, and keeps its budget."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from pathlib import Path

import pytest

from rlhpc.config.load import load_config
from rlhpc.config.schema import RunConfig
from rlhpc.core import attempts
from rlhpc.core.errors import DoesNotFitError, UserError
from rlhpc.launch.studies import advance as module
from rlhpc.launch.studies.study_folder import StudyFolder
from rlhpc.launch.studies.trial_runs import check_fits, planned_hours
from rlhpc.launch.studies.trials_table import StudyTable, read_table
from tests.helpers.plain_model import write_inputs
from tests.launch.studies.measure import infeasible_share, quick_configuration
from tests.launch.studies.trial_stand_in import RATE, SPACE, StandIn, advance, begin, finish


def states(folder: StudyFolder) -> Counter[str]:
    return Counter(row.state for row in read_table(folder).trials)


def check_whole(found: StudyTable, trials: StandIn, count: int) -> None:
    """Every trial is complete, was started once, and has the number of its own run."""
    assert [row.state for row in found.trials] == ["complete"] * count
    assert sorted(trials.starts) == sorted(f"search-{number}" for number in range(count))
    values = {row.number: row.value for row in found.trials}
    assert values[found.best] == max(values.values())  # type: ignore[index, type-var]


@pytest.mark.heavy
def test_every_trial_runs_once_and_the_best_is_known(tmp_path: Path) -> None:
    folder, trials = begin(tmp_path)
    assert advance(folder, trials) == 3
    assert states(folder) == {"running": 3}
    finish(folder, trials)
    found = read_table(folder)
    check_whole(found, trials, 12)
    assert len({row.values[RATE] for row in found.trials}) == 12  # though each advance has a sampler of its own
    finish(folder, trials)
    assert len(trials.starts) == 12


def test_a_claimed_trial_starts_later_with_the_same_settings(tmp_path: Path) -> None:
    folder, trials = begin(tmp_path)
    seen: list[RunConfig] = []

    def interrupt(config: RunConfig) -> None:
        if not seen:
            seen.append(config)
            raise KeyboardInterrupt

    trials.before_start = interrupt
    with pytest.raises(KeyboardInterrupt):
        advance(folder, trials)
    finish(folder, trials)
    found = read_table(folder)
    check_whole(found, trials, 12)
    assert found.trials[0].values[RATE] == seen[0].actor.optimizer.learning_rate


def test_a_torn_journal_and_a_lock_left_behind_are_repaired(tmp_path: Path) -> None:
    folder, trials = begin(tmp_path)
    advance(folder, trials)
    with folder.journal.open("ab") as file:
        file.write(b'{"op_code": 5, "worker_')
    folder.journal.with_name("journal.log.lock").touch()
    began = time.monotonic()
    finish(folder, trials)
    assert time.monotonic() - began < 25  # Optuna's own wait for such a lock is 30 s
    check_whole(read_table(folder), trials, 12)


@pytest.mark.heavy
def test_half_of_the_space_cannot_work_and_is_seldom_suggested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the mean of seeds at most a quarter of the first sixty suggestions; random search has half. Where the best is
    at the border, two fifths are."""
    monkeypatch.setattr(module, "configuration", quick_configuration)
    monkeypatch.setattr(module.Advance, "_check_base", lambda self: None)
    shares = [infeasible_share(tmp_path / str(seed), seed) for seed in range(2)]
    assert statistics.mean(shares) <= 0.25, shares


def test_an_error_of_the_base_is_no_property_of_settings(tmp_path: Path) -> None:
    folder, trials = begin(tmp_path)

    def refuse(config: RunConfig) -> None:
        raise UserError("no such file", where="data.train")

    trials.refuse = refuse
    with pytest.raises(UserError, match=r"data\.train: no such file"):
        advance(folder, trials)
    trials.refuse = lambda config: None
    finish(folder, trials)
    check_whole(read_table(folder), trials, 12)


def test_settings_that_never_work_end_the_search_for_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_INFEASIBLE", 7)
    folder, trials = begin(tmp_path)

    def refuse(config: RunConfig) -> None:
        if config.folder.name != "base":
            raise UserError("does not fit", where="planning")

    trials.refuse = refuse
    with pytest.raises(UserError, match=r"space: 7 settings in a row cannot work, .* does not fit; narrow it"):
        advance(folder, trials)


def test_faults_of_the_cluster_are_retried_and_those_of_settings_learned(tmp_path: Path) -> None:
    causes = {0: "hang", 1: "gpu_memory", 2: "user"}
    folder, trials = begin(tmp_path, budget={"trials": 4, "at_once": 4})

    def outcome(config: RunConfig) -> float | str:
        number = int(config.name.rpartition("-")[2])
        again = len(attempts.folders(folder.trial(number))) > 1
        return causes[number] if number in causes and not (number == 0 and again) else 1.0

    trials.outcome = outcome
    finish(folder, trials)
    assert [row.state for row in read_table(folder).trials] == ["complete", "infeasible", "failed", "complete"]
    assert trials.starts.count("search-0") + trials.starts.count("search-0 again") == 2
    assert [row.why for row in read_table(folder).trials] == ["", "it was gpu_memory", "user", ""]


def test_a_fault_that_comes_again_ends_a_trial(tmp_path: Path) -> None:
    folder, trials = begin(tmp_path, budget={"trials": 1}, retries=2)
    trials.outcome = lambda config: "bad_node"
    finish(folder, trials)
    assert len(trials.starts) == 3
    assert [(row.state, row.why) for row in read_table(folder).trials] == [("failed", "bad_node")]


@pytest.mark.parametrize("limit", ["gpu_hours", "hours"])
def test_a_budget_that_is_used_up_ends_what_runs(tmp_path: Path, limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, trials = begin(tmp_path, budget={"trials": 10, "at_once": 2, limit: 1.0})
    trials.outcome = lambda config: None
    assert advance(folder, trials) == 2
    later = time.time() + 3600
    monkeypatch.setattr(time, "time", lambda: later)
    assert advance(folder, trials) == 0
    assert trials.cancelled == ["trial-0000", "trial-0001"]
    assert [(row.state, row.why) for row in read_table(folder).trials] == [("failed", "budget")] * 2
    assert advance(folder, trials) == 0
    assert len(trials.starts) == 2


def test_keys_depend_on_others(tmp_path: Path) -> None:
    space = {
        "algorithm.kl.coefficient": {"choices": [0.0, 0.01]},
        "train.minibatches": {"choices": [1, 2], "when": {"algorithm.kl.coefficient": 0.01}},
    }
    folder, trials = begin(tmp_path, space=space)
    trials.outcome = lambda config: config.algorithm.kl.coefficient
    finish(folder, trials)
    rows = read_table(folder).trials
    assert {row.values["algorithm.kl.coefficient"] for row in rows} == {0.0, 0.01}
    assert all(("train.minibatches" in row.values) == (row.values["algorithm.kl.coefficient"] == 0.01) for row in rows)


def test_a_grid_ends_with_its_last_cell(tmp_path: Path) -> None:
    space = {RATE: {"choices": [1e-4, 1e-3]}, "train.minibatches": SPACE["train.minibatches"]}
    folder, trials = begin(tmp_path, space=space, sampler={"name": "GridSampler"}, budget={"trials": 50, "at_once": 4})
    finish(folder, trials)
    found = read_table(folder)
    cells = {(row.values[RATE], row.values["train.minibatches"]) for row in found.trials if row.state == "complete"}
    assert len(cells) == len(found.trials) == 6


def test_a_metric_that_the_run_lacks_is_said_in_one_line(tmp_path: Path) -> None:
    folder, trials = begin(tmp_path, objective={"metric": "validation/reward_mean"}, budget={"trials": 1})
    advance(folder, trials)
    with pytest.raises(UserError, match=r"objective\.metric: .* has no RL step with validation/reward_mean"):
        advance(folder, trials)
    assert [(row.state, row.why) for row in read_table(folder).trials] == [("failed", "metric")]


def test_a_run_that_does_not_fit_by_the_plan_is_refused(tmp_path: Path) -> None:
    keys = ["planning.gpu=h100", "slurm.gpus_per_node=1"]
    config = load_config(write_inputs(tmp_path), keys)
    check_fits(config)
    assert (planned_hours(config) or 0.0) > 0.0
    large = load_config(tmp_path / "config.yaml", [*keys, "rollout.kv_cache_gib=200"])
    with pytest.raises(DoesNotFitError, match=r"does not fit, by the plan: .* of .* GiB"):
        check_fits(large)
