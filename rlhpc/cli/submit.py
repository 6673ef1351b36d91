"""``rlhpc submit`` and ``rlhpc resume``. Imports click only; the rest when a command runs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from rlhpc.cli.options import CONFIG, OVERRIDES, grouped
from rlhpc.core.errors import UserError

if TYPE_CHECKING:
    from rlhpc.launch.runs.run_registry import RunEntry
    from rlhpc.launch.runs.submit import Plan

_DRY_RUN = click.option("--dry-run", is_flag=True, help="Print the job script and command; submit nothing.")
_FOLLOW = click.option("--follow", is_flag=True, help="Show the run live until it ends; Ctrl-C leaves it running.")
_KEEP = click.option("--keep", is_flag=True, help="Keep a job that can never start in the queue.")
_ENTRY = click.option("--entry", default="", hidden=True, help="What the batch step calls with the run folder.")


@dataclass(frozen=True)
class SubmitOptions:
    """Options of the commands that submit a job; see ``rlhpc.launch.runs.submit.submit``."""

    dry_run: bool
    follow: bool
    keep: bool = False
    entry: str = ""


@click.command()
@CONFIG
@OVERRIDES
@click.option("--array", is_flag=True, help="Submit several CONFIG files as one job array, each a run of its own.")
@click.option("--run-dir", metavar="FOLDER", help="Run folder; default: run_dir of CONFIG.")
@_DRY_RUN
@_FOLLOW
@_KEEP
@_ENTRY
@grouped(options=SubmitOptions)
def submit(
    *, config: str, overrides: tuple[str, ...], array: bool, run_dir: str | None, options: SubmitOptions
) -> None:
    """Submit CONFIG, a YAML file, to Slurm as a batch job.

    KEY.SUB=VALUE overrides a key of CONFIG.
    """
    from pathlib import Path

    from rlhpc.config.load import load_with_site
    from rlhpc.launch.runs.submit import make_plan

    files = [config, *(word for word in overrides if array and "=" not in word)]
    changes = [word for word in overrides if not array or "=" in word]
    if array and (run_dir is not None or options.follow):
        option = "--follow" if options.follow else "--run-dir"
        raise UserError("applies to one run only", where=option, remedy="leave it out, or submit without --array")
    loaded = [load_with_site(Path(file), changes) for file in files]
    configs = [one.config for one in loaded]
    if run_dir is not None:
        configs = [configs[0].model_copy(update={"run_dir": Path(run_dir)})]
    sites = dict.fromkeys(one.site.text for one in loaded if one.site is not None)
    submit_plan(make_plan(configs, Path.cwd(), dry_run=options.dry_run), options, sites=[*sites])


@click.command()
@click.argument("run")
@OVERRIDES
@_DRY_RUN
@_FOLLOW
@_KEEP
@_ENTRY
@grouped(options=SubmitOptions)
def resume(*, run: str, overrides: tuple[str, ...], options: SubmitOptions) -> None:
    """Resume RUN from its newest checkpoint, as a new batch job.

    RUN is a run folder, a run name or a job id. KEY.SUB=VALUE overrides a key of its configuration.
    """
    import os

    from rlhpc.launch.runs.resume import plan_again, workdir_of
    from rlhpc.launch.runs.run_registry import find_run

    known = find_run(run)
    workdir = workdir_of(known)
    os.chdir(workdir)  # relative paths in the config start there
    submit_plan(plan_again(known, overrides, workdir, dry_run=options.dry_run), options, again=True)


def submit_plan(plan: Plan, options: SubmitOptions, *, again: bool = False, sites: Sequence[str] = ()) -> None:
    """Submit the plan and print the jobs. ``sites``: for a dry run, what comes from which site file."""
    for warning in plan.warnings:
        click.echo(f"rlhpc: warning: {warning}", err=True)
    if options.dry_run:
        from rlhpc.core.redaction import redact

        click.echo(redact(plan.script), nl=False)
        click.echo(f"\n# submitted as: (cd {plan.workdir} && umask 077 && {plan.command})")
        for site in sites:
            click.echo(f"# from site file {site}")
        return
    from rlhpc.launch.runs.submit import submit as submit_to_slurm

    runs = submit_to_slurm(plan, again=again, keep=options.keep, entry=options.entry)
    _print_jobs(runs)
    if options.follow:
        from rlhpc.launch.runs.follow import follow as watch

        sys.exit(watch(runs[0]))


def _print_jobs(runs: Sequence[RunEntry]) -> None:
    """Job, folder, queue state and the next commands of each run."""
    from rlhpc.launch.runs.status import queue_words
    from rlhpc.launch.slurm.queue import read_jobs

    ids = [run.job.job_id for run in runs if run.job]
    try:
        jobs = read_jobs(ids)
    except UserError:  # they are in the queue all the same
        jobs = {}
    for run, job_id in zip(runs, ids, strict=True):
        click.echo(f"submitted job {job_id}: {run.name}")
        click.echo(f"  folder  {run.folder.path}")
        if job_id in jobs:
            click.echo(f"  queue   {queue_words(jobs[job_id])}")
    word = ids[0] if len(ids) == 1 else ids[0].partition("_")[0]
    click.echo(f"  next    rlhpc status {word} | rlhpc logs {ids[0]} | rlhpc cancel {word}")
