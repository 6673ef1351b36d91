"""Decisions at the end of a study's segment, by the journal alone.

Successive halving (Jamieson & Talwalkar 2016) continues the best trials. Population-based training (Jaderberg et al.
2017) continues the worst ones as copies of the best. A decision is a function of the results in the journal, so that an
interrupted one is repeated exactly.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlhpc.config.study import Goal, Parameter, PopulationSection, Scalar, SegmentsSection, StudyFile
from rlhpc.core.attempts import saved_step
from rlhpc.core.files import make_folder
from rlhpc.core.folder import RunFolder
from rlhpc.launch.studies.space import applies

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

# Attributes of trials: the segment that it is in, from 0; its number of the objective at the end of each so far.
SEGMENT, RESULTS = "segment", "results"
VALUES, COPIES = "values", "copies"  # attributes of trials: values after the last copy; [segment, source] of each


def segment_of(trial: FrozenTrial) -> int:
    """The segment that a trial is in, from 0."""
    return int(trial.user_attrs.get(SEGMENT, 0))


def results_of(trial: FrozenTrial) -> list[float]:
    """Numbers of a trial at the ends of its segments so far, without the last segment's."""
    return list(trial.user_attrs.get(RESULTS, ()))


def is_waiting(trial: FrozenTrial) -> bool:
    """True if a trial waits for others at the end of a segment."""
    return not trial.state.is_finished() and len(results_of(trial)) > segment_of(trial)


@dataclass(frozen=True)
class EndedSegment:
    """A segment that all its trials have ended. ``values``: results by number; ``waiting``: trials without a decision
    yet."""

    segment: int
    values: Mapping[int, float]
    waiting: tuple[int, ...]


def ended_segments(trials: Iterable[FrozenTrial], segments: SegmentsSection) -> list[EndedSegment]:
    """Segments but the last that all trials have ended. All trials of the first have begun."""
    known = [*trials]
    found = []
    for segment in range(len(segments.steps) - 1):
        if any(not trial.state.is_finished() and len(results_of(trial)) <= segment for trial in known):
            break
        values = {trial.number: results_of(trial)[segment] for trial in known if len(results_of(trial)) > segment}
        waiting = [trial.number for trial in known if is_waiting(trial) and segment_of(trial) == segment]
        found.append(EndedSegment(segment, values, tuple(waiting)))
    return found


def in_order(values: Mapping[int, float], goal: Goal) -> list[int]:
    """Numbers of the trials, the best first; of equal ones, the first."""
    sign = -1.0 if goal == "maximize" else 1.0
    return sorted(values, key=lambda number: (sign * values[number], number))


def values_of_trial(trial: FrozenTrial) -> dict[str, Any]:
    """The values with which a trial trains now."""
    return dict(trial.user_attrs.get(VALUES, trial.params))


def copies_of(trial: FrozenTrial) -> list[tuple[int, int]]:
    """Segments after which a trial went on from another one's checkpoint, each with that trial's number."""
    return [(int(segment), int(source)) for segment, source in trial.user_attrs.get(COPIES, ())]


def sources(values: Mapping[int, float], population: PopulationSection, goal: Goal) -> dict[int, int]:
    """Trials that become copies, with their sources: the worst of all copies the best, and so on."""
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
