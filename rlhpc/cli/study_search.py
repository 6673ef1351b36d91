"""``rlhpc study run | advance | status | best | plot | export``. Imports click only; the rest when a command runs."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rlhpc.cli.echo import echo
from rlhpc.cli.json_text import json_text
from rlhpc.cli.options import JSON
from rlhpc.cli.tables import labelled, table

if TYPE_CHECKING:
    from rlhpc.config.schema import RunConfig
    from rlhpc.config.study import StudyFile
    from rlhpc.launch.studies.study_folder import StudyFolder
    from rlhpc.launch.studies.trials_table import StudyTable

FOLDER = click.argument("folder", type=click.Path(path_type=Path), metavar="FOLDER")
_INTERRUPTED = 130
_FROM = "Folder of a finished run from whose result the sampler learns; before the first trial, repeatable."


@click.command()
@click.argument("file", type=click.Path(path_type=Path), metavar="STUDY.yaml")
@click.option("--local", is_flag=True, help="Run the trials here, one after another.")
@click.option("--dry-run", is_flag=True, help="Check, and show what the study may cost; start nothing.")
@click.option("--from", "known", type=click.Path(path_type=Path), multiple=True, metavar="RUN", help=_FROM)
def run(*, file: Path, local: bool, dry_run: bool, known: tuple[Path, ...]) -> None:
    """Search values of configuration keys by runs that are Slurm jobs.

    Each job starts the next ones at its end. The same command goes on with a study, or raises its budget.
    """
    from rlhpc.config.study import load_study
    from rlhpc.launch.studies.journal import check_optuna, make_sampler
    from rlhpc.launch.studies.space import learn_from
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
    if known:
        learn_from(folder, known)
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
    from rlhpc.launch.studies.study_folder import StudyFolder
    from rlhpc.launch.studies.trials_table import read_table

    found = read_table(StudyFolder(folder.absolute()))
    echo(json_text(found.to_json()) if as_json else "\n".join(status_lines(found)))


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
@click.argument("file", type=click.Path(path_type=Path), metavar="FILE.parquet")
def export(*, folder: Path, file: Path) -> None:
    """Write all trials as Parquet."""
    from rlhpc.launch.studies.study_folder import StudyFolder
    from rlhpc.launch.studies.trials_table import export as export_trials

    export_trials(StudyFolder(folder.absolute()), file)


@click.command()
@FOLDER
@click.option("--output", type=click.Path(path_type=Path), metavar="FILE.html", help="Default: study.html in FOLDER.")
def plot(*, folder: Path, output: Path | None) -> None:
    """Write a page with all trials, their history, and how much each key matters."""
    from rlhpc.launch.studies.study_folder import StudyFolder
    from rlhpc.launch.studies.study_page import write_page

    file = output or folder / "study.html"
    write_page(StudyFolder(folder.absolute()), file)
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
    """What a study may cost at most."""
    from rlhpc.config.ranks import with_job_ranks
    from rlhpc.launch.slurm.commands import seconds_of
    from rlhpc.launch.studies.trial_runs import planned_hours

    budget, keys = study.budget, ", ".join(study.space)
    rows = [("study", f"{study.name}: {len(study.space)} key(s): {keys}")]
    rows.append(("trials", f"{budget.trials}, " + ("one at a time" if local else f"at most {budget.at_once} at once")))
    ranks = (with_job_ranks(base) or base).world_size
    starts, share = budget.trials, 1.0
    if study.segments is not None:
        sizes, share = study.segments.sizes(budget.trials), study.segments.share(budget.trials)
        starts = sum(sizes)
        words = ", ".join(f"{count} to step {end}" for count, end in zip(sizes, study.segments.steps, strict=True))
        rows.append(("segments", f"{words}: {share:.0%} of the steps of whole trials, in {starts} starts"))
    seconds = seconds_of(base.slurm.time) if base.slurm.time is not None else None
    if seconds is not None and not local:
        hours = starts * ranks * seconds / 3600
        rows.append(("cost", f"at most {hours:,.1f} hours of {ranks} rank(s) by slurm.time, without retries"))
    planned = planned_hours(base)
    if planned is not None:
        hours = budget.trials * planned * share
        rows.append(("planned", f"{hours:,.1f} hours of ranks, {planned:,.2f} for a run with the values of the base"))
    limits = [("gpu_hours", budget.gpu_hours, "hours of ranks"), ("hours", budget.hours, "hours from the beginning")]
    for name, value, words in limits:
        if value is not None:
            rows.append(("limit", f"{value:g} {words} (budget.{name})"))
    return rows


def status_lines(found: StudyTable) -> list[str]:
    """The table of a study as text."""
    hours = sum(row.rank_hours for row in found.rows)
    rows = [("study", found.study.name), ("metric", found.objective_words)]
    rows.append(("trials", f"{found.counts_words or 'none yet'}; {hours:.3g} hours of ranks"))
    cells = [[*row[:-1], row[-1][:60]] for row in found.cells()]
    lines = [*labelled(rows), "", *table([found.head, *cells], left=(0, 1, len(found.head) - 1))]
    return [
        *lines,
        *(
            ["", "* the best; one run each: compare it by several seeds before you believe it (docs/studies.md)"]
            if found.best is not None
            else []
        ),
    ]
