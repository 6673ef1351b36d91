"""Search space of a study: from a trial of Optuna to the configuration of a run."""

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
    """Values of the keys that apply. Values that the trial has already are kept."""
    found: dict[str, Scalar] = {}
    for key in study.in_order:
        parameter = study.space[key]
        if _applies(parameter, found):
            found[key] = _suggest(trial, key, _distribution(parameter))
    return found


def _applies(parameter: Parameter, values: Mapping[str, Scalar]) -> bool:
    """True if a key is set beside these values of others."""
    conditions = ((other, one if isinstance(one, tuple) else (one,)) for other, one in parameter.when.items())
    return all(other in values and values[other] in wanted for other, wanted in conditions)


def configuration(folder: StudyFolder, study: StudyFile, number: int, values: Mapping[str, Scalar]) -> RunConfig:
    """Configuration of a trial. Raises UserError for values that a key does not take."""
    overrides = [f"{key}={json.dumps(value)}" for key, value in values.items()]
    run = [f"name={json.dumps(f'{study.name}-{number}')}", f"run_dir={json.dumps(str(folder.trial(number).path))}"]
    return load_config(folder.base, [*overrides, *run])


def _distribution(parameter: Parameter) -> Any:
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
