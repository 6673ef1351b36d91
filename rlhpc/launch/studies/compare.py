"""``rlhpc study compare``: compares configurations by runs of equal seeds, and draws their curves."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from rlhpc.config.saved import differing_keys
from rlhpc.config.study import Goal, ObjectiveSection
from rlhpc.core.errors import UserError
from rlhpc.core.records import MetricsFile
from rlhpc.launch.studies.paired import FEWEST_PAIRS, Paired, holm, paired, seeds_needed
from rlhpc.launch.studies.sides import Side, curve, is_finished, objective_of, value_of

# Keys that name and start a run and do not change its results; and the seed, which differs within a side.
_NOT_COMPARED = (
    *("name", "run_dir", "seed", "slurm", "site", "prepare", "observe", "profile", "planning", "recovery"),
    "data.template_time",
)
Band = dict[int, tuple[float, float]]  # by step: mean over seeds, and standard deviation


@dataclass(frozen=True)
class SideSeed:
    """A run of a side that does not count yet."""

    side: str
    seed: int


@dataclass(frozen=True)
class SideRun(SideSeed):
    """A finished run of a side with its number."""

    value: float


@dataclass(frozen=True)
class SidePair:
    """Two sides on their common seeds: fields of ``Paired``. ``p``: corrected for the number of comparisons;
    ``interval``: that of the difference, at the level of one comparison; ``seeds_needed``: number that decides so large
    a difference in four of five cases; ``verdict``: the better side, or that it is not decided."""

    first: str
    second: str
    pairs: int
    difference: float
    deviation: float
    spread: float
    effect: float | None
    p: float | None
    interval: tuple[float, float] | None
    seeds_needed: int | None
    verdict: str


@dataclass(frozen=True)
class Difference:
    """A key in which a side's configuration differs from the first one's, with the value of every side."""

    key: str
    values: tuple[Any, ...]


@dataclass(frozen=True)
class SideComparison:
    """Result of a comparison. ``objective``: the number of a run, in words."""

    metric: str
    objective: str
    goal: Goal
    level: float
    runs: tuple[SideRun, ...]
    unfinished: tuple[SideSeed, ...]
    pairs: tuple[SidePair, ...]
    differences: tuple[Difference, ...]


def compare(sides: Sequence[Side], objective: ObjectiveSection, level: float) -> SideComparison:
    """Compares the finished runs of each two sides. Raises UserError for a metric that a run lacks, and without
    scipy."""
    names = [side.name for side in sides]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UserError(f"{twice!r} names two sides", where="study compare", remedy="give each its own name")
    if find_spec("scipy") is None:
        raise UserError("needs scipy", where="study compare", remedy="pip install 'rlhpc[study]'")
    numbers = {
        side.name: {seed: objective_of(run, objective) for seed, run in side.runs.items() if is_finished(run)}
        for side in sides
    }
    tests = [
        (first, second, test)
        for first, second in itertools.combinations(numbers, 2)
        if (test := _paired(numbers[first], numbers[second])) is not None
    ]
    return SideComparison(
        objective.metric,
        objective.words,
        objective.goal,
        level,
        runs=tuple(SideRun(name, *each) for name, values in numbers.items() for each in values.items()),
        unfinished=tuple(SideSeed(s.name, seed) for s in sides for seed in s.runs if seed not in numbers[s.name]),
        pairs=_corrected(tests, objective.goal, level),
        differences=_differences(sides),
    )


def _paired(first: Mapping[int, float], second: Mapping[int, float]) -> Paired | None:
    seeds = sorted({*first} & {*second})
    return paired([first[seed] for seed in seeds], [second[seed] for seed in seeds]) if seeds else None


def _corrected(tests: Sequence[tuple[str, str, Paired]], goal: Goal, level: float) -> tuple[SidePair, ...]:
    corrected = iter(holm([test.p for *_, test in tests if test.p is not None]))
    found = []
    for first, second, test in tests:
        p = next(corrected) if test.p is not None else None
        better = second if (test.difference > 0) == (goal == "maximize") else first
        found.append(
            SidePair(
                **{**asdict(test), "first": first, "second": second, "effect": test.effect, "p": p},
                interval=test.interval(level) if test.pairs >= FEWEST_PAIRS else None,
                seeds_needed=seeds_needed(test, level) if p is not None else None,
                verdict=f"{better} is better" if p is not None and p <= level else "not decided",
            )
        )
    return tuple(found)


def _differences(sides: Sequence[Side]) -> tuple[Difference, ...]:
    dumps = [side.config.model_dump(mode="json") for side in sides]
    keys = {key for dump in dumps[1:] for key, *_ in differing_keys(dumps[0], dump, _NOT_COMPARED)}
    return tuple(Difference(key, tuple(value_of(dump, key) for dump in dumps)) for key in sorted(keys))


def bands(sides: Sequence[Side], metric: str) -> dict[str, Band]:
    """Bands of each side's finished runs, at the steps that all of them have."""
    found = {}
    for side in sides:
        curves = [curve(MetricsFile(run.metrics).steps(), metric) for run in side.runs.values() if is_finished(run)]
        steps = set.intersection(*map(set, curves)) if curves else set()
        at = {step: [one[step] for one in curves] for step in sorted(steps)}
        found[side.name] = {step: (fmean(each), stdev(each) if len(each) > 1 else 0.0) for step, each in at.items()}
    return found


def draw(found: Mapping[str, Band], metric: str, file: Path) -> None:
    """Writes the plot. Raises UserError without matplotlib, or for a kind of file unknown to it."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError(
            "needs matplotlib", where="--plot", remedy="pip install 'rlhpc[study]', or leave it out"
        ) from None

    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for name, band in found.items():
        steps, means = list(band), [mean for mean, _ in band.values()]
        (line,) = axes.plot(steps, means, label=name)
        low = [mean - spread for mean, spread in band.values()]
        high = [mean + spread for mean, spread in band.values()]
        axes.fill_between(steps, low, high, color=line.get_color(), alpha=0.2, linewidth=0)
    axes.set_xlabel("RL step")
    axes.set_ylabel(metric)
    axes.legend()
    try:
        figure.savefig(file)
    except ValueError as error:
        raise UserError(str(error).splitlines()[0], where="--plot", remedy="name a .png, .svg or .pdf file") from None
