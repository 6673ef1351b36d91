"""Successive halving (Jamieson & Talwalkar 2016): which trials go on after a segment, by the journal alone.

A decision is a function of the results that the journal has, so that one that was interrupted is made again alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Literal

from rlhpc.config.study import SegmentsSection

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

# Attributes of trials: the segment that it is in, from 0; its number of the objective at the end of each so far.
SEGMENT, RESULTS = "segment", "results"


def segment_of(trial: FrozenTrial) -> int:
    """The segment that a trial is in, from 0."""
    return int(trial.user_attrs.get(SEGMENT, 0))


def results_of(trial: FrozenTrial) -> list[float]:
    """Its numbers at the ends of its segments so far, without the last segment's."""
    return list(trial.user_attrs.get(RESULTS, ()))


def is_waiting(trial: FrozenTrial) -> bool:
    """Whether a trial waits for others at the end of a segment."""
    return not trial.state.is_finished() and len(results_of(trial)) > segment_of(trial)


def decided(
    trials: Iterable[FrozenTrial], segments: SegmentsSection, goal: Literal["maximize", "minimize"]
) -> dict[int, bool]:
    """Of trials that wait, by number whether they go on; without those whose segment others have not ended. All trials
    of the first segment have begun."""
    known = [*trials]
    found: dict[int, bool] = {}
    for segment in range(len(segments.steps) - 1):
        if any(not trial.state.is_finished() and len(results_of(trial)) <= segment for trial in known):
            break
        ended = {trial.number: results_of(trial)[segment] for trial in known if len(results_of(trial)) > segment}
        going = best_of(ended, segments.kept(len(ended)), goal)
        here = [trial.number for trial in known if is_waiting(trial) and segment_of(trial) == segment]
        found |= {number: number in going for number in here}
    return found


def best_of(values: Mapping[int, float], count: int, goal: Literal["maximize", "minimize"]) -> set[int]:
    """Numbers of the ``count`` best trials; of equal ones, the first."""
    sign = -1.0 if goal == "maximize" else 1.0
    return {*sorted(values, key=lambda number: (sign * values[number], number))[:count]}
