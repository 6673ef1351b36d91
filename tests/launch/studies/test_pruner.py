"""A trial's job asks Optuna's pruner at each new value of the objective, and a rejected trial ends once."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path

import pytest

from rlhpc.config import yaml12
from rlhpc.config.load import load_config
from rlhpc.core import attempts
from rlhpc.core.attempts import Verdict
from rlhpc.core.folder import RunFolder
from rlhpc.launch.studies.advance import Advance
from rlhpc.launch.studies.study_folder import StudyFolder
from rlhpc.launch.studies.trial_job import prune
from rlhpc.launch.studies.trials_table import read_table
from tests.helpers.runs import ROOT
from tests.launch.studies.trial_processes import check_kills
from tests.launch.studies.trial_stand_in import RATE, StandIn, advance, begin, score, write_steps

STEPS = 9
LOW = {"name": "ThresholdPruner", "arguments": {"lower": 0.5}}


def begun(folder: Path, pruner: Mapping[str, object], **fields: object) -> tuple[StudyFolder, StandIn]:
    """A study whose trials have STEPS steps and go on."""
    base = folder / "base.yaml"
    settings = yaml12.parse((ROOT / "configs" / "demo.yaml").read_text(), "demo")
    settings["train"]["steps"] = STEPS
    base.write_text(yaml12.dump(settings))
    study, trials = begin(folder, base=str(base), pruner=pruner, **fields)
    trials.outcome = lambda config: None
    return study, trials


def is_rejected(folder: StudyFolder, trials: StandIn, number: int) -> bool:
    with folder.locked():
        return Advance(folder, trials).prune(number)


def ended(run: RunFolder) -> None:
    attempts.end(attempts.folders(run)[-1], Verdict(0.0, "finished", "", "none"))


@pytest.mark.heavy
def test_successive_halving_asked_at_each_value_trains_a_third_of_the_grid(tmp_path: Path) -> None:
    """Two of twelve trials at a time, which train step by step: the best one is complete."""
    space = {RATE: {"choices": [1e-5, 1e-4, 1e-3, 3e-3]}, "train.minibatches": {"choices": [1, 2, 4]}}
    halving = {"name": "SuccessiveHalvingPruner", "arguments": {"min_resource": 1, "reduction_factor": 3}}
    known = {"space": space, "sampler": {"name": "GridSampler"}, "budget": {"trials": 12, "at_once": 2}}
    folder, trials = begun(tmp_path, halving, **known)
    lengths, scores = dict[int, int](), dict[int, float]()
    while advance(folder, trials):
        for row in read_table(folder).trials:
            if row.state == "running":
                run, length = folder.trial(row.number), lengths.get(row.number, 0) + 1
                lengths[row.number] = length
                known = scores.setdefault(row.number, score(load_config(run.config)) if length == 1 else 0.0)
                write_steps(run, [known + 0.01 * step for step in range(length)])
                if length == STEPS:
                    ended(run)
                is_rejected(folder, trials, row.number)
    rows = read_table(folder).trials
    assert {row.state for row in rows} == {"complete", "pruned"}
    assert all((lengths[row.number] == STEPS) == (row.state == "complete") for row in rows)
    best = max(rows, key=lambda row: row.value or -9.0)
    assert best.values == {RATE: 1e-3, "train.minibatches": 4}
    assert (len(rows), best.number) == (12, read_table(folder).best)
    assert sum(lengths.values()) <= 0.45 * 12 * STEPS


def test_the_pruner_sees_the_objective_and_a_pruned_trial_keeps_its_last_value(tmp_path: Path) -> None:
    """The mean of the last two values; it falls below the limit at the fourth step."""
    objective = {"metric": "reward/mean", "last": 2}
    folder, trials = begun(tmp_path, LOW, objective=objective, budget={"trials": 1})
    advance(folder, trials)
    write_steps(folder.trial(0), [1.0, 1.0, 0.4])
    assert not is_rejected(folder, trials, 0)
    write_steps(folder.trial(0), [1.0, 1.0, 0.4, 0.2, 9.0])
    assert is_rejected(folder, trials, 0)
    (row,) = read_table(folder).trials
    assert (row.state, row.value) == ("pruned", pytest.approx(0.3))
    assert is_rejected(folder, trials, 0)  # again after a kill: its job still has to end
    assert advance(folder, trials) == 0


@pytest.mark.parametrize("finished", [False, True])
def test_a_trial_is_not_pruned_at_its_end(tmp_path: Path, finished: bool) -> None:
    folder, trials = begun(tmp_path, LOW, budget={"trials": 1})
    advance(folder, trials)
    write_steps(folder.trial(0), [1.0] * (STEPS - 1) + [0.0] if not finished else [0.0] * STEPS)
    if finished:
        ended(folder.trial(0))
    assert not is_rejected(folder, trials, 0)
    ended(folder.trial(0))
    advance(folder, trials)
    assert [(row.state, row.value) for row in read_table(folder).trials] == [("complete", 0.0)]


def test_a_value_after_which_the_process_was_killed_is_asked_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import optuna

    folder, trials = begun(tmp_path, LOW, budget={"trials": 1})
    advance(folder, trials)
    write_steps(folder.trial(0), [0.0])

    def killed(self: object) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(optuna.trial.Trial, "should_prune", killed)
        with pytest.raises(KeyboardInterrupt):
            is_rejected(folder, trials, 0)
    assert is_rejected(folder, trials, 0)


def test_a_rejected_trial_s_job_is_ended_also_after_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, trials = begun(tmp_path, LOW, budget={"trials": 1})
    advance(folder, trials)
    write_steps(folder.trial(0), [0.0])
    calls, over = list[str](), threading.Event()

    def end() -> None:
        calls.append(read_table(folder).trials[0].state)
        if len(calls) == 1:
            raise OSError("no answer")

    limit = threading.Timer(30.0, over.set)
    limit.start()
    prune(folder, folder.trial(0), end, over, 0.0)
    limit.cancel()
    assert calls == ["pruned", "pruned"]
    assert "the pruner is not asked: no answer" in capsys.readouterr().err


@pytest.mark.parametrize("values", [[], [1.0]])
def test_the_study_is_read_only_after_new_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], values: list[float]
) -> None:
    """It is absent, which is reported as soon as it is read."""
    write_steps(RunFolder(tmp_path), values)
    over = threading.Event()
    threading.Timer(0.05, over.set).start()
    prune(StudyFolder(tmp_path), RunFolder(tmp_path), over.set, over, 0.001)
    assert ("the pruner is not asked" in capsys.readouterr().err) == bool(values)


@pytest.mark.long
@pytest.mark.workers
def test_processes_killed_at_random_moments_lose_and_repeat_nothing(tmp_path: Path) -> None:
    """Twenty of them: docs/measurements/2026-11-studies.md."""
    check_kills(tmp_path, kills=3)
