"""``rlhpc submit`` and ``rlhpc resume``. Imports click only; the rest when a command runs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from rlhpc.core.errors import UserError

if TYPE_CHECKING:
    from rlhpc.launch.runs.run_registry import Run
    from rlhpc.launch.runs.submit import Plan

_DRY_RUN = click.option("--dry-run", is_flag=True, help="Print the job script and command, and submit nothing.")
_FOLLOW = click.option("--follow", is_flag=True, help="Show the run live until its end; Ctrl-C leaves it running.")
_KEEP = click.option("--keep", is_flag=True, help="Leave a job in the queue that can never start as asked for.")


_ENTRY = click.option("--entry", default="", hidden=True, help="What the batch step calls with the run folder.")


@click.command()
@click.argument("config")
@click.argument("overrides", nargs=-1, metavar="[KEY.SUB=VALUE]...")
@click.option("--array", is_flag=True, help="Several CONFIG files become one job array, each its own run.")
@click.option("--run-dir", metavar="FOLDER", help="Where the run is written; default: run_dir of CONFIG.")
@_DRY_RUN
@_FOLLOW
@_KEEP
@_ENTRY
def submit(
    config: str,
    overrides: tuple[str, ...],
    array: bool,
    run_dir: str | None,
    dry_run: bool,
    follow: bool,
    keep: bool,
    entry: str,
) -> None:
    """Hand CONFIG, a YAML file, to Slurm as a batch job; KEY.SUB=VALUE changes a key of it."""
    from pathlib import Path

    from rlhpc.config.load import load_config
    from rlhpc.launch.runs.submit import make_plan

    files = [config, *(word for word in overrides if array and "=" not in word)]
    changes = [word for word in overrides if not array or "=" in word]
    if array and (run_dir is not None or follow):
        option = "--follow" if follow else "--run-dir"
        raise UserError("is for one run", where=option, remedy="leave it out, or submit without --array")
    configs = [load_config(Path(file), changes) for file in files]
    if run_dir is not None:
        configs = [configs[0].model_copy(update={"run_dir": Path(run_dir)})]
    hand_over(make_plan(configs, Path.cwd()), dry_run, follow, {"keep": keep, "entry": entry})


@click.command()
@click.argument("run")
@click.argument("overrides", nargs=-1, metavar="[KEY.SUB=VALUE]...")
@_DRY_RUN
@_FOLLOW
@_KEEP
@_ENTRY
def resume(run: str, overrides: tuple[str, ...], dry_run: bool, follow: bool, keep: bool, entry: str) -> None:
    """Submit RUN again, to go on from its newest checkpoint. RUN is its folder, its name or its job's id."""
    import os

    from rlhpc.launch.runs.resume import plan_again, workdir_of
    from rlhpc.launch.runs.run_registry import find_run

    known = find_run(run)
    workdir = workdir_of(known)
    os.chdir(workdir)  # relative paths of the config start there
    hand_over(plan_again(known, overrides, workdir), dry_run, follow, {"keep": keep, "entry": entry, "again": True})


def hand_over(plan: Plan, dry_run: bool, follow: bool, options: dict[str, Any]) -> None:
    """Submit the plan with ``options`` of rlhpc.launch.runs.submit.submit, and say what became of it."""
    for warning in plan.warnings:
        click.echo(f"rlhpc: warning: {warning}", err=True)
    if dry_run:
        click.echo(plan.script, nl=False)
        click.echo(f"\n# submitted as: (cd {plan.workdir} && umask 077 && {plan.command})")
        return
    from rlhpc.launch.runs.submit import submit as give

    runs = give(plan, **options)
    _tell(runs)
    if follow:
        from rlhpc.launch.runs.follow import follow as watch

        sys.exit(watch(runs[0]))


def _tell(runs: Sequence[Run]) -> None:
    """Job, folder, when it is expected to start, and what to type next."""
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
