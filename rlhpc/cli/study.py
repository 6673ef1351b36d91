"""``rlhpc study``. Imports click only; the rest when a command runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rlhpc.cli.echo import echo
from rlhpc.cli.json_text import json_text
from rlhpc.cli.options import JSON, grouped
from rlhpc.cli.study_search import advance, best, export, plot, run, status
from rlhpc.cli.tables import labelled, table
from rlhpc.core.errors import UserError

if TYPE_CHECKING:
    from rlhpc.config.study import Goal
    from rlhpc.launch.studies.compare import SideComparison, SidePair
    from rlhpc.launch.studies.sides import Side


@click.group()
def study() -> None:
    """Search values of configuration keys, and compare configurations, over many runs."""


for command in (run, advance, status, best, plot, export):
    study.add_command(command)


@dataclass(frozen=True)
class _Number:
    """Options on the one number of each run."""

    metric: str
    goal: Goal
    last: int
    best: bool


@dataclass(frozen=True)
class _Missing:
    """Options on runs that are missing."""

    seeds: int | None
    local: bool
    dry_run: bool


@study.command()
@click.argument("sides", nargs=-1, required=True, metavar="A B [C]...")
@click.option("--metric", default="validation/reward_mean", show_default=True, help="Metric that is compared.")
@click.option("--goal", type=click.Choice(["maximize", "minimize"]), default="maximize", show_default=True)
@click.option("--last", type=click.IntRange(min=1), default=1, show_default=True, help="Mean of its last N values.")
@click.option("--best", is_flag=True, help="Its best value in place of its last ones.")
@click.option("--level", type=click.FloatRange(0.0001, 0.5), default=0.05, show_default=True, help="Risk of an error.")
@click.option("--seeds", type=click.IntRange(1, 1000), help="Submit what is missing of N seeds for each configuration.")
@click.option("--local", is_flag=True, help="With --seeds: run it here, one after another.")
@click.option("--dry-run", is_flag=True, help="With --seeds: show what is missing; start nothing.")
@click.option("--plot", type=click.Path(path_type=Path), metavar="FILE", help="Draw the curves with bands.")
@JSON
@grouped(number=_Number, absent=_Missing)
def compare(
    *, sides: tuple[str, ...], level: float, plot: Path | None, as_json: bool, number: _Number, absent: _Missing
) -> None:
    """Compare configurations by runs with equal seeds: whether they differ by more than seeds do.

    A and B are YAML files, whose runs are in folders such as runs/NAME-seed-0, or folders of runs.
    """
    import sys

    from rlhpc.config.study import ObjectiveSection
    from rlhpc.launch.studies.compare import bands, draw
    from rlhpc.launch.studies.compare import compare as compare_sides
    from rlhpc.launch.studies.sides import find_side

    _check_options(sides, number, absent)
    known = [find_side(text) for text in sides]
    if absent.seeds is not None and _start(known, absent.seeds, absent, as_json=as_json):
        return
    known = [find_side(text) for text in sides] if absent.local else known
    found = compare_sides(known, ObjectiveSection(**asdict(number)), level)
    if plot is not None:
        draw(bands(known, number.metric), number.metric, plot)
    echo(json_text(found.to_json()) if as_json else "\n".join(comparison_lines(found)))
    if not any(found.numbers.values()):
        sys.exit(1)


def _check_options(sides: Sequence[str], number: _Number, absent: _Missing) -> None:
    if len(sides) < 2:
        raise UserError("needs two sides", where="study compare", remedy="name two configurations or folders of runs")
    if number.best and number.last != 1:
        raise UserError("contradicts --last", where="--best", remedy="leave one of them out")
    option = "--local" if absent.local else "--dry-run" if absent.dry_run else None
    if absent.seeds is None and option is not None:
        raise UserError("applies to runs that are missing", where=option, remedy="add --seeds, or leave it out")


def _start(sides: Sequence[Side], seeds: int, how: _Missing, *, as_json: bool) -> bool:
    """Starts what is missing; whether there is nothing to compare yet."""
    import sys

    from rlhpc.launch.studies.sides import missing, run_missing, submit_missing

    absent = missing(sides, seeds)
    if how.dry_run or (not how.local and any(absent)):
        runs = [] if how.dry_run else submit_missing(absent)
        ids = {str(run.folder.path): run.job.job_id for run in runs if run.job is not None}
        rows = [
            {"name": one.name, "seed": one.seed, "folder": str(folder), "job_id": ids.get(str(folder))}
            for configs in absent
            for one in configs
            for folder in [one.folder.absolute()]
        ]
        echo(json_text({"missing": rows}) if as_json else "\n".join(_missing_lines(rows, seeds)))
        return True
    if how.local and (code := run_missing(absent)):
        sys.exit(code)
    return False


def _missing_lines(rows: Sequence[dict[str, Any]], seeds: int) -> list[str]:
    if not rows:
        return [f"no run is missing of {seeds} seed(s) for each side"]
    lines = [f"{'submitted' if row['job_id'] else 'missing'}  {row['name']}  {row['job_id'] or ''}" for row in rows]
    return [*(line.rstrip() for line in lines), "compare again when they have finished"]


def comparison_lines(found: SideComparison) -> list[str]:
    """The comparison as text."""
    higher = "higher" if found.objective.goal == "maximize" else "lower"
    lines = [*labelled([("metric", f"{found.objective.words}; {higher} is better")]), ""]
    lines += [*_runs_table(found), ""]
    for pair in found.pairs:
        lines += [*labelled(_pair_rows(found, pair)), ""]
    if not found.pairs:
        lines += ["no two sides have finished runs of the same seed", ""]
    for side, seeds in found.unfinished.items():
        if seeds:
            lines.append(
                f"{side}: the run(s) with seed {', '.join(map(str, seeds))} have not finished, and do not count"
            )
    if prompts := [key for key, _ in found.differ if key.startswith("data.") or key == "train.prompts_per_step"]:
        lines.append(f"{', '.join(prompts)}: runs of one seed do not see the same prompts in the same order")
    rows = [["differ", *found.numbers], *([key, *map(_short, values)] for key, values in found.differ)]
    return [*lines, *(table(rows, left=range(len(rows[0]))) if found.differ else ["the configurations do not differ"])]


def _runs_table(found: SideComparison) -> list[str]:
    seeds = sorted({seed for values in found.numbers.values() for seed in values})
    rows = [
        [str(seed), *(f"{values[seed]:.5g}" if seed in values else "" for values in found.numbers.values())]
        for seed in seeds
    ]
    return table([["seed", *found.numbers], *rows])


def _pair_rows(found: SideComparison, pair: SidePair) -> list[tuple[str, str]]:
    """What is said of two sides; with fewer than three pairs nothing but that it is not decided."""
    title, verdict = f"{pair.second} - {pair.first}", pair.verdict(found.objective, found.level)
    interval = found.interval(pair)
    if interval is None or pair.p is None:
        return [("pair", f"{title}: {verdict} ({pair.test.pairs} pair(s) of seeds; at least 3 are needed)")]
    several = ", corrected for the number of comparisons" if len(found.pairs) > 1 else ""
    effect = pair.test.effect
    return [
        ("pair", f"{title}: {verdict}"),
        (
            "",
            f"{pair.test.difference:+.4g}, {1 - found.level:.0%} interval {interval[0]:+.4g} to {interval[1]:+.4g}, "
            f"p = {pair.p:.2g} (paired t, {pair.test.pairs} pairs{several})",
        ),
        ("", f"{abs(effect):.2g} x the spread between seeds" if effect is not None else "seeds make no difference"),
        *([("", _needed(pair.seeds, found.level))] if verdict == "not decided" else []),
    ]


def _needed(seeds: int | None, level: float) -> str:
    if seeds is None:
        return "a difference as small as this is not decided by 1,000 seeds"
    return f"a difference as large as this is decided with {seeds} seeds in four of five cases (level {level:g})"


def _short(value: Any) -> str:
    return "" if value is None else str(value)
