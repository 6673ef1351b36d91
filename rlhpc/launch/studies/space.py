"""From a trial of Optuna to the configuration of a run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rlhpc.config.load import load_config
from rlhpc.config.schema import RunConfig
from rlhpc.config.study import Parameter, Scalar, StudyFile
from rlhpc.launch.studies.study_folder import StudyFolder

if TYPE_CHECKING:
    from optuna.trial import BaseTrial


def suggest(trial: BaseTrial, study: StudyFile) -> dict[str, Scalar]:
    """Values of the keys that apply; those that the trial has already stay as they are."""
    found: dict[str, Scalar] = {}
    for key in study.in_order:
        parameter = study.space[key]
        if all(other in found and found[other] in _values(wanted) for other, wanted in parameter.when.items()):
            found[key] = _suggest(trial, key, parameter)
    return found


def configuration(folder: StudyFolder, study: StudyFile, number: int, values: Mapping[str, Scalar]) -> RunConfig:
    """Configuration of a trial. Raises UserError for values that a key does not take."""
    overrides = [f"{key}={json.dumps(value)}" for key, value in values.items()]
    run = [f"name={json.dumps(f'{study.name}-{number}')}", f"run_dir={json.dumps(str(folder.trial(number).path))}"]
    return load_config(folder.base, [*overrides, *run])


def _values(wanted: Scalar | tuple[Scalar, ...]) -> tuple[Scalar, ...]:
    return wanted if isinstance(wanted, tuple) else (wanted,)


def _suggest(trial: BaseTrial, key: str, parameter: Parameter) -> Any:
    low, high, step = parameter.low, parameter.high, parameter.step
    if parameter.choices is not None:
        return trial.suggest_categorical(key, parameter.choices)
    if isinstance(low, int) and isinstance(high, int):
        return trial.suggest_int(key, low, high, step=int(step or 1), log=parameter.log)
    assert low is not None
    assert high is not None
    return trial.suggest_float(key, low, high, step=step, log=parameter.log)
