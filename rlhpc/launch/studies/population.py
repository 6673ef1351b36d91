"""Population-based training (Jaderberg et al. 2017): the worst trials of a segment go on as copies of the best.

Which are copied, and the values of a copy, are functions of the journal, as in ``halving``.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from rlhpc.config.study import Parameter, PopulationSection, Scalar, StudyFile
from rlhpc.core.attempts import saved_step
from rlhpc.core.files import make_folder
from rlhpc.core.folder import RunFolder
from rlhpc.launch.studies.halving import in_order
from rlhpc.launch.studies.space import applies

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

VALUES, COPIES = "values", "copies"  # attributes of trials: values after the last copy; [segment, source] of each


def values_of_trial(trial: FrozenTrial) -> dict[str, Any]:
    """The values with which a trial trains now."""
    return dict(trial.user_attrs.get(VALUES, trial.params))


def copies_of(trial: FrozenTrial) -> list[tuple[int, int]]:
    """After which segments a trial went on from another one's checkpoint, and whose."""
    return [(int(segment), int(source)) for segment, source in trial.user_attrs.get(COPIES, ())]


def sources(
    values: Mapping[int, float], population: PopulationSection, goal: Literal["maximize", "minimize"]
) -> dict[int, int]:
    """The trials that become copies, with those whose copies they become: the worst of all of the best, and so on."""
    order, count = in_order(values, goal), population.replaced(len(values))
    return {order[-1 - place]: order[place] for place in range(count)}


def changed(study: StudyFile, values: Mapping[str, Scalar], chance: random.Random) -> dict[str, Scalar]:
    """Values of a copy: those of its source, each somewhat larger or smaller."""
    assert study.segments is not None
    assert study.segments.population is not None
    found: dict[str, Scalar] = {}
    for key in study.in_order:
        parameter = study.space[key]
        if applies(parameter, found):
            found[key] = _changed(parameter, values.get(key, _first(parameter)), study.segments.population, chance)
    return found


def adopt_checkpoint(target: RunFolder, source: RunFolder) -> None:
    """Replaces the newest checkpoint of a run by that of another one, at the same step. Files are linked where the file
    system can: nobody writes into a complete checkpoint."""
    name = f"step-{saved_step(source):08d}"
    make_folder(target.checkpoints)
    new, old = target.checkpoints / f".copy-{name}", target.checkpoints / f".replaced-{name}"
    for left in (new, old):
        shutil.rmtree(left, ignore_errors=True)
    shutil.copytree(source.checkpoints / name, new, copy_function=_link)
    final = target.checkpoints / name
    if final.exists():
        final.rename(old)
    new.rename(final)
    shutil.rmtree(old, ignore_errors=True)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _first(parameter: Parameter) -> Scalar:
    return parameter.choices[0] if parameter.choices is not None else parameter.low


def _changed(parameter: Parameter, value: Scalar, population: PopulationSection, chance: random.Random) -> Scalar:
    if parameter.choices is not None:
        place = parameter.choices.index(value) + chance.choice([-1, 0, 0, 1])
        return parameter.choices[min(max(place, 0), len(parameter.choices) - 1)]
    assert isinstance(value, int | float)
    assert parameter.low is not None
    assert parameter.high is not None
    up = chance.random() < 0.5
    scaled = value * population.factor if up else value / population.factor
    step = parameter.step or (1 if parameter.whole else None)
    if step is not None:
        least = value + step if up else value - step  # a factor alone may change nothing
        scaled = max(scaled, least) if up else min(scaled, least)
        scaled = parameter.low + step * round((scaled - parameter.low) / step)
    found = min(max(scaled, parameter.low), parameter.high)
    return round(found) if parameter.whole else float(found)
