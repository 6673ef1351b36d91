"""Table of a study's trials: a row for each, and the best one."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhpc.config.load import dump_config
from rlhpc.config.study import StudyFile
from rlhpc.core.errors import UserError
from rlhpc.core.folder import RunFolder
from rlhpc.launch.studies.advance import CAUSE, show_value, trial_hours
from rlhpc.launch.studies.journal import INFEASIBLE, WARM, open_study
from rlhpc.launch.studies.segments import copies_of, is_waiting, results_of, values_of_trial
from rlhpc.launch.studies.space import configuration, suggest
from rlhpc.launch.studies.study_folder import StudyFolder, read_study

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial


@dataclass(frozen=True)
class TrialRow:
    """A trial. ``state``: running, waiting (for others at the end of a segment), complete, pruned, failed or
    infeasible; ``value``: of a complete one, or at the end of its last segment; ``values``: of the keys that were
    searched; ``why``: of a failed or infeasible one; ``rank_hours``: hours of its ranks, lost attempts included."""

    number: int
    state: str
    value: float | None
    values: dict[str, Any]
    why: str
    rank_hours: float
    folder: str


@dataclass(frozen=True)
class StudyTable:
    """Trials of a study. ``best``: number of the trial with the best value, None before the first is complete."""

    study: StudyFile
    rows: tuple[TrialRow, ...]
    best: int | None

    @property
    def objective_words(self) -> str:
        """The one number of a trial, and which values are better, in words."""
        higher = "higher" if self.study.objective.goal == "maximize" else "lower"
        return f"{self.study.objective.words}; {higher} is better"

    @property
    def counts_words(self) -> str:
        """Trials by state, in words."""
        return ", ".join(f"{count} {state}" for state, count in Counter(row.state for row in self.rows).items())

    @property
    def head(self) -> list[str]:
        """Titles of the columns of ``cells``."""
        return ["trial", "state", "value", *self.study.space, ""]

    def cells(self) -> list[list[str]]:
        """A row of text for each trial; the best one's number has a star."""
        return [
            [
                f"{row.number}{' *' * (row.number == self.best)}",
                row.state,
                "" if row.value is None else f"{row.value:.5g}",
                *(show_value(row.values[key]) if key in row.values else "" for key in self.study.space),
                row.why,
            ]
            for row in self.rows
        ]

    def to_json(self) -> dict[str, Any]:
        """Fields by name."""
        return {
            **{"name": self.study.name, "objective": self.study.objective.words},
            **{"goal": self.study.objective.goal, "best": self.best, "trials": [asdict(row) for row in self.rows]},
        }


def read_table(folder: StudyFolder) -> StudyTable:
    """Table of all trials in the journal of a study."""
    study = read_study(folder)
    with folder.locked():
        trials = open_study(folder, study).get_trials(deepcopy=False)
    rows = tuple(_row(folder, trial) for trial in trials)
    complete = [(row.value, row.number) for row in rows if row.state == "complete" and row.value is not None]
    choose = max if study.objective.goal == "maximize" else min
    best = choose(complete, key=lambda each: each[0])[1] if complete else None
    return StudyTable(study, rows, best)


def best_configuration(folder: StudyFolder) -> str:
    """The configuration of the best trial as YAML, under its own name and folder. Raises UserError before there is
    one."""
    import optuna

    table = read_table(folder)
    if table.best is None:
        raise UserError("no trial is complete yet", where=str(folder.path), remedy="see `rlhpc study status`")
    values = suggest(optuna.trial.FixedTrial(table.rows[table.best].values), table.study)
    config = configuration(folder, table.study, table.best, values)
    named = {"name": f"{table.study.name}-best", "run_dir": Path("runs") / f"{table.study.name}-best"}
    return dump_config(config.model_copy(update=named))


def export(folder: StudyFolder, file: Path) -> None:
    """Writes all trials as Parquet: a column for each key that is searched, null where it is not set."""
    import pyarrow
    import pyarrow.parquet

    table = read_table(folder)
    rows = [
        {
            **{name: value for name, value in asdict(row).items() if name != "values"},
            **{key: row.values.get(key) for key in table.study.space},
        }
        for row in table.rows
    ]
    names = ["number", "state", "value", "why", "rank_hours", "folder", *table.study.space]
    columns = {name: [row[name] for row in rows] for name in names}
    try:
        found = pyarrow.table(columns)
    except (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError):  # choices of several types
        found = pyarrow.table({name: [None if v is None else str(v) for v in each] for name, each in columns.items()})
    pyarrow.parquet.write_table(found, file)


def _row(folder: StudyFolder, trial: FrozenTrial) -> TrialRow:
    warm = trial.user_attrs.get(WARM)
    run = RunFolder(Path(warm)) if warm is not None else folder.trial(trial.number)
    infeasible = trial.user_attrs.get(INFEASIBLE, "")
    state = {"FAIL": "failed"}.get(trial.state.name, trial.state.name.lower())
    state = "infeasible" if infeasible else "waiting" if is_waiting(trial) else state
    why = infeasible or trial.user_attrs.get(CAUSE, "") or ("a run of before" if warm else "")
    results = results_of(trial)
    value = trial.value if state == "complete" else results[-1] if results else None
    hours = 0.0 if warm else trial_hours(folder, trial)
    if copies := copies_of(trial):
        why = ", ".join([*([why] if why else []), f"a copy of trial {copies[-1][1]} since segment {copies[-1][0] + 1}"])
    return TrialRow(trial.number, state, value, values_of_trial(trial), why, hours, str(run.path))
