"""``rlhpc study``. Imports click only; the rest when a command runs."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rlhpc.cli.options import JSON, grouped
from rlhpc.cli.output import echo, json_text, labelled, table
from rlhpc.core.errors import UserError

if TYPE_CHECKING:
    from rlhpc.config.schema import RunConfig
    from rlhpc.config.study import Goal, StudyFile
    from rlhpc.launch.studies.compare import SideComparison, SidePair
    from rlhpc.launch.studies.sides import Side
    from rlhpc.launch.studies.study_folder import StudyFolder
    from rlhpc.launch.studies.trials_table import StudyTable

FOLDER = click.argument("folder", type=click.Path(path_type=Path), metavar="FOLDER")
_INTERRUPTED = 130
_NO_SPREAD = "seeds make no difference"


@click.command()
@click.argument("file", type=click.Path(path_type=Path), metavar="STUDY.yaml")
@click.option("--local", is_flag=True, help="Run the trials here, one after another.")
@click.option("--dry-run", is_flag=True, help="Check, and show what the study may cost; start nothing.")
def run(*, file: Path, local: bool, dry_run: bool) -> None:
    """Search values of configuration keys by runs that are Slurm jobs.

    Each job starts the next ones at its end. The same command goes on with a study, or raises its budget.
    """
    from rlhpc.config.study import load_study
    from rlhpc.launch.studies.journal import check_optuna, make_sampler
    from rlhpc.launch.studies.study_folder import base_of, create
    from rlhpc.launch.studies.trial_runs import LocalTrials, SlurmTrials

    check_optuna()
    study = load_study(file)
    base = base_of(study)
    make_sampler(study)
    (LocalTrials() if local else SlurmTrials(Path.cwd())).check(base)
    echo("\n".join(labelled(_cost(study, base, local=local))))
    if dry_run:
        return
    folder = create(study, base, local=local)
    echo("\n".join(labelled([("folder", str(folder.path))])))
    _advance(folder)


@click.command()
@FOLDER
def advance(*, folder: Path) -> None:
    """Take note of trials that have ended, and start the next ones.

    The job of each trial does this at its end; by hand, it repairs what was interrupted.
    """
    from rlhpc.launch.studies.study_folder import StudyFolder, read_beginning, read_study

    found = StudyFolder(folder.absolute())
    read_study(found)
    os.chdir(read_beginning(found).workdir)
    _advance(found)


@click.command()
@FOLDER
@JSON
def status(*, folder: Path, as_json: bool) -> None:
    """Show all trials of a study."""
    from rlhpc.launch.studies.study_folder import StudyFolder, read_study
    from rlhpc.launch.studies.trials_table import read_table

    place = StudyFolder(folder.absolute())
    found = read_table(place)
    echo(json_text(asdict(found)) if as_json else "\n".join(status_lines(found, [*read_study(place).space])))


@click.command()
@FOLDER
@click.option("--output", type=click.Path(path_type=Path), metavar="FILE", help="Write it to a file.")
def best(*, folder: Path, output: Path | None) -> None:
    """Print the configuration of the best trial as YAML."""
    from rlhpc.core.files import write_atomic
    from rlhpc.launch.studies.study_folder import StudyFolder
    from rlhpc.launch.studies.trials_table import best_configuration

    text = best_configuration(StudyFolder(folder.absolute()))
    if output is None:
        echo(text, nl=False)
    else:
        write_atomic(output, text)


@click.command()
@FOLDER
@click.option("--output", type=click.Path(path_type=Path), metavar="FOLDER", help="Default: FOLDER/plots.")
def plot(*, folder: Path, output: Path | None) -> None:
    """Draw Optuna's pictures: history, values by step, each key and its importance."""
    from rlhpc.launch.studies.study_folder import StudyFolder
    from rlhpc.launch.studies.study_plots import plot_study

    for file in plot_study(StudyFolder(folder.absolute()), output or folder / "plots"):
        echo(f"written: {file}")


def _advance(folder: StudyFolder) -> None:
    from rlhpc.launch.studies.advance import advance as advance_study
    from rlhpc.launch.studies.trials_table import read_table

    try:
        running = advance_study(folder)
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)
    found = read_table(folder)
    echo(f"{running} running; {found.counts_words}; see `rlhpc study status {os.path.relpath(folder.path)}`")


def _cost(study: StudyFile, base: RunConfig, *, local: bool) -> list[tuple[str, str]]:
    """Maximum cost of a study."""
    from rlhpc.config.schema import with_job_ranks
    from rlhpc.launch.slurm.commands import seconds_of
    from rlhpc.launch.studies.trial_runs import planned_hours

    budget, keys = study.budget, ", ".join(study.space)
    rows = [("study", f"{study.name}: {len(study.space)} key(s): {keys}")]
    rows.append(("trials", f"{budget.trials}, " + ("one at a time" if local else f"at most {budget.at_once} at once")))
    ranks = (with_job_ranks(base) or base).world_size
    seconds = seconds_of(base.slurm.time) if base.slurm.time is not None else None
    if seconds is not None and not local:
        hours = budget.trials * ranks * seconds / 3600
        rows.append(("cost", f"at most {hours:,.1f} hours of {ranks} rank(s) by slurm.time, without retries"))
    planned = planned_hours(base)
    if planned is not None:
        hours = budget.trials * planned
        rows.append(("planned", f"{hours:,.1f} hours of ranks, {planned:,.2f} for a run with the values of the base"))
    limits = [("gpu_hours", budget.gpu_hours, "hours of ranks"), ("hours", budget.hours, "hours from the beginning")]
    for name, value, words in limits:
        if value is not None:
            rows.append(("limit", f"{value:g} {words} (budget.{name})"))
    return rows


def status_lines(found: StudyTable, keys: Sequence[str]) -> list[str]:
    """The table of a study as text, with a column for each key; the best trial has a star."""
    from rlhpc.launch.studies.advance import show_value

    hours = sum(row.rank_hours for row in found.trials)
    higher = "higher" if found.goal == "maximize" else "lower"
    rows = [("study", found.name), ("metric", f"{found.objective}; {higher} is better")]
    rows.append(("trials", f"{found.counts_words or 'none yet'}; {hours:.3g} hours of ranks"))
    cells = [
        [
            f"{row.number}{' *' * (row.number == found.best)}",
            row.state,
            "" if row.value is None else f"{row.value:.5g}",
            *(show_value(row.values[key]) if key in row.values else "" for key in keys),
            row.why[:60],
        ]
        for row in found.trials
    ]
    lines = [*labelled(rows), "", *table([["trial", "state", "value", *keys, ""], *cells], left=(0, 1, len(keys) + 3))]
    if found.best is not None:
        lines += ["", "* the best; one run each: compare it by several seeds before you believe it (docs/studies.md)"]
    return lines


class _Study(click.Group):
    """The group of the commands. Raises UserError for a former one."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of a name."""
        if cmd_name == "export":
            remedy = "use `rlhpc study status FOLDER --json`"
            raise UserError("this command was removed", where="study export", remedy=remedy)
        return super().get_command(ctx, cmd_name)


@click.group(cls=_Study)
def study() -> None:
    """Search values of configuration keys, and compare configurations, over many runs."""


for command in (run, advance, status, best, plot):
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
    echo(json_text(asdict(found)) if as_json else "\n".join(comparison_lines(found, [side.name for side in known])))
    if not found.runs:
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


def comparison_lines(found: SideComparison, sides: Sequence[str]) -> list[str]:
    """The comparison as text."""
    higher = "higher" if found.goal == "maximize" else "lower"
    lines = [*labelled([("metric", f"{found.objective}; {higher} is better")]), ""]
    numbers = {(run.side, run.seed): f"{run.value:.5g}" for run in found.runs}
    seeds = sorted({run.seed for run in found.runs})
    rows = [[str(seed), *(numbers.get((side, seed), "") for side in sides)] for seed in seeds]
    lines += [*table([["seed", *sides], *rows]), ""]
    for pair in found.pairs:
        lines += [*labelled(_pair_rows(found, pair)), ""]
    if not found.pairs:
        lines += ["no two sides have finished runs of the same seed", ""]
    for side in sides:
        if absent := ", ".join(str(run.seed) for run in found.unfinished if run.side == side):
            lines.append(f"{side}: the run(s) with seed {absent} have not finished, and do not count")
    keys = [each.key for each in found.differences]
    if prompts := [key for key in keys if key.startswith("data.") or key == "train.prompts_per_step"]:
        lines.append(f"{', '.join(prompts)}: runs of one seed do not see the same prompts in the same order")
    rows = [["differ", *sides], *([each.key, *map(_short, each.values)] for each in found.differences)]
    return [*lines, *(table(rows, left=range(len(rows[0]))) if keys else ["the configurations do not differ"])]


def _pair_rows(found: SideComparison, pair: SidePair) -> list[tuple[str, str]]:
    """Text on two sides; fewer than three pairs decide nothing."""
    title = f"{pair.second} - {pair.first}"
    if pair.interval is None or pair.p is None:
        return [("pair", f"{title}: {pair.verdict} ({pair.pairs} pair(s) of seeds; at least 3 are needed)")]
    several = ", corrected for the number of comparisons" if len(found.pairs) > 1 else ""
    low, high = pair.interval
    return [
        ("pair", f"{title}: {pair.verdict}"),
        (
            "",
            f"{pair.difference:+.4g}, {1 - found.level:.0%} interval {low:+.4g} to {high:+.4g}, "
            f"p = {pair.p:.2g} (paired t, {pair.pairs} pairs{several})",
        ),
        ("", f"{abs(pair.effect):.2g} x the spread between seeds" if pair.effect is not None else _NO_SPREAD),
        *([("", _needed(pair.seeds_needed, found.level))] if pair.verdict == "not decided" else []),
    ]


def _needed(seeds: int | None, level: float) -> str:
    if seeds is None:
        return "a difference as small as this is not decided by 1,000 seeds"
    return f"a difference as large as this is decided with {seeds} seeds in four of five cases (level {level:g})"


def _short(value: Any) -> str:
    return "" if value is None else str(value)
