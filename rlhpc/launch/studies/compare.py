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
from rlhpc.config.study import ObjectiveSection
from rlhpc.core.errors import UserError
from rlhpc.core.folder import RunFolder
from rlhpc.launch.studies.objective import check_metric, curve, read_steps
from rlhpc.launch.studies.paired import FEWEST_PAIRS, Paired, holm, paired, seeds_needed
from rlhpc.launch.studies.sides import Side, is_finished, value_of

# Keys that name and start a run and do not change its results; and the seed, which differs within a side.
_NOT_COMPARED = ("name", "run_dir", "seed", "slurm", "site", "prepare", "observe", "profile", "planning", "recovery")
Band = dict[int, tuple[float, float]]  # by step: mean over seeds, and standard deviation


@dataclass(frozen=True)
class SidePair:
    """Two sides on their common seeds. ``p``: corrected for the number of comparisons; ``seeds``: number that decides
    so large a difference in four of five cases."""

    first: str
    second: str
    test: Paired
    p: float | None
    seeds: int | None

    def verdict(self, objective: ObjectiveSection, level: float) -> str:
        """Name of the better side, or that it is not decided."""
        if self.p is None or self.p > level:
            return "not decided"
        rises = (self.test.difference > 0) == (objective.goal == "maximize")
        return f"{self.second if rises else self.first} is better"


@dataclass(frozen=True)
class SideComparison:
    """Result of a comparison. ``numbers``: by side and seed; ``unfinished``: seeds of runs that do not count yet, by
    side; ``differ``: keys in which each side's configuration differs from the first one's, with the value of every
    side."""

    objective: ObjectiveSection
    level: float
    numbers: Mapping[str, Mapping[int, float]]
    unfinished: Mapping[str, tuple[int, ...]]
    pairs: tuple[SidePair, ...]
    differ: tuple[tuple[str, tuple[Any, ...]], ...]

    def to_json(self) -> dict[str, Any]:
        """Fields by name."""
        pairs = [
            {
                **{"first": pair.first, "second": pair.second, **asdict(pair.test), "effect": pair.test.effect},
                **{"p": pair.p, "interval": self.interval(pair), "seeds_needed": pair.seeds},
                "verdict": pair.verdict(self.objective, self.level),
            }
            for pair in self.pairs
        ]
        numbers = [
            {"side": side, "seed": seed, "value": value}
            for side, values in self.numbers.items()
            for seed, value in values.items()
        ]
        unfinished = [{"side": side, "seed": seed} for side, seeds in self.unfinished.items() for seed in seeds]
        return {
            **{"metric": self.objective.metric, "objective": self.objective.words, "goal": self.objective.goal},
            **{"level": self.level, "runs": numbers, "unfinished": unfinished, "pairs": pairs},
            "differences": [{"key": key, "values": [*values]} for key, values in self.differ],
        }

    def interval(self, pair: SidePair) -> tuple[float, float] | None:
        """Confidence interval of the difference, at the level of one comparison; None with too few pairs."""
        return pair.test.interval(self.level) if pair.test.pairs >= FEWEST_PAIRS else None


def compare(sides: Sequence[Side], objective: ObjectiveSection, level: float) -> SideComparison:
    """Compares the finished runs of each two sides. Raises UserError for a metric that a run lacks, and without
    scipy."""
    names = [side.name for side in sides]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UserError(f"{twice!r} names two sides", where="study compare", remedy="give each its own name")
    if find_spec("scipy") is None:
        raise UserError("needs scipy", where="study compare", remedy="pip install 'rlhpc[study]'")
    numbers, unfinished = {}, {}
    for side in sides:
        unfinished[side.name] = tuple(seed for seed, run in side.runs.items() if not is_finished(run))
        numbers[side.name] = {
            seed: _number(run, objective) for seed, run in side.runs.items() if seed not in unfinished[side.name]
        }
    tests = [
        (first, second, test)
        for first, second in itertools.combinations(numbers, 2)
        if (test := _paired(numbers[first], numbers[second])) is not None
    ]
    return SideComparison(objective, level, numbers, unfinished, _corrected(tests, level), _differ(sides))


def _number(run: RunFolder, objective: ObjectiveSection) -> float:
    records = read_steps(run)
    check_metric(records, objective, run)
    return objective.of([*curve(records, objective.metric).values()])


def _paired(first: Mapping[int, float], second: Mapping[int, float]) -> Paired | None:
    seeds = sorted({*first} & {*second})
    return paired([first[seed] for seed in seeds], [second[seed] for seed in seeds]) if seeds else None


def _corrected(tests: Sequence[tuple[str, str, Paired]], level: float) -> tuple[SidePair, ...]:
    known = [found.p for *_, found in tests if found.p is not None]
    corrected = iter(holm(known))
    return tuple(
        SidePair(first, second, found, next(corrected), seeds_needed(found, level))
        if found.p is not None
        else SidePair(first, second, found, None, None)
        for first, second, found in tests
    )


def _differ(sides: Sequence[Side]) -> tuple[tuple[str, tuple[Any, ...]], ...]:
    dumps = [side.config.model_dump(mode="json") for side in sides]
    keys = {key for dump in dumps[1:] for key, *_ in differing_keys(dumps[0], dump, _NOT_COMPARED)}
    return tuple((key, tuple(value_of(dump, key) for dump in dumps)) for key in sorted(keys))


def bands(sides: Sequence[Side], metric: str) -> dict[str, Band]:
    """Bands of each side's finished runs, at the steps that all of them have."""
    found = {}
    for side in sides:
        curves = [curve(read_steps(run), metric) for run in side.runs.values() if is_finished(run)]
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
        raise UserError("needs matplotlib", where="--plot", remedy="pip install matplotlib, or leave it out") from None

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
