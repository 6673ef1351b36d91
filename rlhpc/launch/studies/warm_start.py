"""Results of finished runs, from which a study's sampler learns before its first trial."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhpc.config.load import load_config
from rlhpc.config.study import Parameter, StudyFile
from rlhpc.core.errors import UserError
from rlhpc.core.folder import RunFolder
from rlhpc.launch.studies.advance import objective_of
from rlhpc.launch.studies.journal import FEASIBLE, WARM, open_study
from rlhpc.launch.studies.objective import check_metric, curve, read_steps
from rlhpc.launch.studies.sides import is_finished, value_of
from rlhpc.launch.studies.space import distribution, values_of
from rlhpc.launch.studies.study_folder import StudyFolder, read_study

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial


def learn_from(folder: StudyFolder, runs: Sequence[Path]) -> None:
    """Adds finished runs to a study without trials; they cost nothing of its budget. Raises UserError for a run that
    has not finished, or has a value outside the space."""
    study = read_study(folder)
    with folder.locked():
        found = open_study(folder, study)
        if found.get_trials(deepcopy=False):
            raise UserError(
                "the study has trials already", where="--from", remedy="leave it out, or begin another study"
            )
        for trial in [_trial(study, RunFolder(path)) for path in runs]:
            found.add_trial(trial)


def _trial(study: StudyFile, run: RunFolder) -> FrozenTrial:
    import optuna

    if not run.config.is_file() or not is_finished(run):
        raise UserError("is no finished run", where=f"--from {run.path}", remedy="name a run folder")
    dump, values = load_config(run.config).model_dump(mode="json"), dict[str, Any]()
    for key in study.in_order:
        parameter = study.space[key]
        if all(other in values and values[other] in values_of(wanted) for other, wanted in parameter.when.items()):
            values[key] = value_of(dump, key)
            if not _contains(parameter, values[key]):
                raise UserError(
                    f"{values[key]!r} is outside the space", where=f"{key} of {run.path}", remedy="leave the run out"
                )
    objective, records = objective_of(study), read_steps(run)
    check_metric(records, objective, run)
    return optuna.trial.create_trial(
        params=values,
        distributions={key: distribution(study.space[key]) for key in values},
        value=objective.of([*curve(records, objective.metric).values()]),
        user_attrs={WARM: str(run.path.absolute())},
        constraints={FEASIBLE: -1.0},
    )


def _contains(parameter: Parameter, value: Any) -> bool:
    if parameter.choices is not None:
        return value in parameter.choices
    assert parameter.low is not None
    assert parameter.high is not None
    return isinstance(value, int | float) and parameter.low <= value <= parameter.high
