"""Successive halving (Jamieson & Talwalkar 2016): which trials go on after a segment, by the journal alone.

A decision is a function of the results that the journal has, so that one that was interrupted is made again alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
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


@dataclass(frozen=True)
class EndedSegment:
    """A segment that all its trials have ended. ``values``: results by number; ``waiting``: trials of which nothing is
    noted yet."""

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


def in_order(values: Mapping[int, float], goal: Literal["maximize", "minimize"]) -> list[int]:
    """Numbers of the trials, the best first; of equal ones, the first."""
    sign = -1.0 if goal == "maximize" else 1.0
    return sorted(values, key=lambda number: (sign * values[number], number))
