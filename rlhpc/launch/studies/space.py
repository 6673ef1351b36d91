"""Search space of a study: from a trial of Optuna to the configuration of a run, and from a finished run to a trial."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhpc.config.load import load_config
from rlhpc.config.schema import RunConfig
from rlhpc.config.study import Parameter, Scalar, StudyFile
from rlhpc.core.errors import UserError
from rlhpc.core.folder import RunFolder
from rlhpc.launch.studies.journal import FEASIBLE, WARM, open_study
from rlhpc.launch.studies.objective import check_metric, curve, read_steps
from rlhpc.launch.studies.sides import is_finished, value_of
from rlhpc.launch.studies.study_folder import StudyFolder, check_segments, read_study

if TYPE_CHECKING:
    from optuna.trial import BaseTrial, FrozenTrial


def suggest(trial: BaseTrial, study: StudyFile) -> dict[str, Scalar]:
    """Values of the keys that apply. Values that the trial has already are kept."""
    found: dict[str, Scalar] = {}
    for key in study.in_order:
        parameter = study.space[key]
        if applies(parameter, found):
            found[key] = _suggest(trial, key, distribution(parameter))
    return found


def applies(parameter: Parameter, values: Mapping[str, Scalar]) -> bool:
    """True if a key is set beside these values of others."""
    conditions = ((other, one if isinstance(one, tuple) else (one,)) for other, one in parameter.when.items())
    return all(other in values and values[other] in wanted for other, wanted in conditions)


def configuration(
    folder: StudyFolder, study: StudyFile, number: int, values: Mapping[str, Scalar], segment: int = -1
) -> RunConfig:
    """Configuration of a trial up to the end of a segment, by default the last. Raises UserError for values that a key
    does not take."""
    overrides = [f"{key}={json.dumps(value)}" for key, value in values.items()]
    run = [f"name={json.dumps(f'{study.name}-{number}')}", f"run_dir={json.dumps(str(folder.trial(number).path))}"]
    if study.segments is None:
        return load_config(folder.base, [*overrides, *run])
    config = load_config(folder.base, [*overrides, *run, f"train.steps={study.segments.steps[segment]}"])
    check_segments(config)
    return config


def distribution(parameter: Parameter) -> Any:
    """Distribution of a key's values for Optuna."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    low, high, step = parameter.low, parameter.high, parameter.step
    if parameter.choices is not None:
        return CategoricalDistribution(parameter.choices)
    if isinstance(low, int) and isinstance(high, int):
        return IntDistribution(low, high, log=parameter.log, step=int(step or 1))
    assert low is not None
    assert high is not None
    return FloatDistribution(low, high, log=parameter.log, step=step)


def _suggest(trial: BaseTrial, key: str, values: Any) -> Any:
    from optuna.distributions import CategoricalDistribution, IntDistribution

    if isinstance(values, CategoricalDistribution):
        return trial.suggest_categorical(key, values.choices)
    if isinstance(values, IntDistribution):
        return trial.suggest_int(key, values.low, values.high, step=values.step, log=values.log)
    return trial.suggest_float(key, values.low, values.high, step=values.step, log=values.log)


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
        if applies(parameter, values):
            values[key] = value_of(dump, key)
            if not _contains(parameter, values[key]):
                raise UserError(
                    f"{values[key]!r} is outside the space", where=f"{key} of {run.path}", remedy="leave the run out"
                )
    objective, records = study.objective, read_steps(run)
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
