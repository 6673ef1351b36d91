"""A plot of each side's curve, with a band over its seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev

from rlhpc.core.errors import UserError
from rlhpc.launch.studies.objective import curve, read_steps
from rlhpc.launch.studies.sides import Side, is_finished

Band = dict[int, tuple[float, float]]  # by step: mean over seeds, and standard deviation


def bands(sides: Sequence[Side], metric: str) -> dict[str, Band]:
    """Of each side's finished runs, at the steps that all of them have."""
    found = {}
    for side in sides:
        curves = [curve(read_steps(run), metric) for run in side.runs.values() if is_finished(run)]
        steps = set.intersection(*map(set, curves)) if curves else set()
        found[side.name] = {step: _spread([one[step] for one in curves]) for step in sorted(steps)}
    return found


def _spread(values: Sequence[float]) -> tuple[float, float]:
    return fmean(values), stdev(values) if len(values) > 1 else 0.0


def draw(found: Mapping[str, Band], metric: str, file: Path) -> None:
    """Writes the plot. Raises UserError without matplotlib, or for a kind of file that it does not know."""
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
