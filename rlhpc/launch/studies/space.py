"""From a trial of Optuna to the configuration of a run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rlhpc.config.load import load_config
from rlhpc.config.schema import RunConfig
from rlhpc.config.study import Parameter, Scalar, StudyFile
from rlhpc.launch.studies.study_folder import StudyFolder, check_segments

if TYPE_CHECKING:
    from optuna.trial import BaseTrial


def suggest(trial: BaseTrial, study: StudyFile) -> dict[str, Scalar]:
    """Values of the keys that apply; those that the trial has already stay as they are."""
    found: dict[str, Scalar] = {}
    for key in study.in_order:
        parameter = study.space[key]
        if applies(parameter, found):
            found[key] = _suggest(trial, key, distribution(parameter))
    return found


def applies(parameter: Parameter, values: Mapping[str, Scalar]) -> bool:
    """Whether a key is set beside these values of others."""
    return all(other in values and values[other] in values_of(wanted) for other, wanted in parameter.when.items())


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


def values_of(wanted: Scalar | tuple[Scalar, ...]) -> tuple[Scalar, ...]:
    """The values of a condition."""
    return wanted if isinstance(wanted, tuple) else (wanted,)


def distribution(parameter: Parameter) -> Any:
    """The values of a key, as Optuna has them."""
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
