"""Table of a study's trials: a row for each, and the best one."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhpc.config.load import dump_config
from rlhpc.config.study import Goal
from rlhpc.core.errors import UserError
from rlhpc.launch.studies.advance import CAUSE, trial_hours
from rlhpc.launch.studies.journal import INFEASIBLE, open_study
from rlhpc.launch.studies.space import configuration, suggest
from rlhpc.launch.studies.study_folder import StudyFolder, read_study

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial


@dataclass(frozen=True)
class TrialRow:
    """A trial. ``state``: running, complete, pruned, failed or infeasible; ``value``: of a complete one, or the last of
    a pruned one; ``values``: of the keys that were searched; ``why``: of a failed or infeasible one; ``rank_hours``:
    hours of its ranks, lost attempts included."""

    number: int
    state: str
    value: float | None
    values: dict[str, Any]
    why: str
    rank_hours: float
    folder: str


@dataclass(frozen=True)
class StudyTable:
    """Trials of a study. ``objective``: the one number of a trial, in words; ``best``: number of the trial with the
    best value, None before the first is complete."""

    name: str
    objective: str
    goal: Goal
    best: int | None
    trials: tuple[TrialRow, ...]

    @property
    def counts_words(self) -> str:
        """Trials by state, in words."""
        return ", ".join(f"{count} {state}" for state, count in Counter(row.state for row in self.trials).items())


def read_table(folder: StudyFolder) -> StudyTable:
    """Table of all trials in the journal of a study."""
    study = read_study(folder)
    with folder.locked():
        trials = open_study(folder, study).get_trials(deepcopy=False)
    rows = tuple(_row(folder, trial) for trial in trials)
    complete = [(row.value, row.number) for row in rows if row.state == "complete" and row.value is not None]
    goal = study.objective.goal
    choose = max if goal == "maximize" else min
    best = choose(complete, key=lambda each: each[0])[1] if complete else None
    return StudyTable(study.name, study.objective.words, goal, best, rows)


def best_configuration(folder: StudyFolder) -> str:
    """The configuration of the best trial as YAML, under its own name and folder. Raises UserError before there is
    one."""
    import optuna

    study, table = read_study(folder), read_table(folder)
    if table.best is None:
        raise UserError("no trial is complete yet", where=str(folder.path), remedy="see `rlhpc study status`")
    values = suggest(optuna.trial.FixedTrial(table.trials[table.best].values), study)
    config = configuration(folder, study, table.best, values)
    named = {"name": f"{study.name}-best", "run_dir": Path("runs") / f"{study.name}-best"}
    return dump_config(config.model_copy(update=named))


def _row(folder: StudyFolder, trial: FrozenTrial) -> TrialRow:
    infeasible = trial.user_attrs.get(INFEASIBLE, "")
    state = "infeasible" if infeasible else {"FAIL": "failed"}.get(trial.state.name, trial.state.name.lower())
    value = trial.value if state in ("complete", "pruned") else None
    why, run = infeasible or trial.user_attrs.get(CAUSE, ""), folder.trial(trial.number)
    return TrialRow(trial.number, state, value, dict(trial.params), why, trial_hours(folder, trial), str(run.path))
