"""``rlhpc run``, ``submit``, ``resume``, ``cancel``, ``replay``. Imports click only; the rest when a command runs."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from rlhpc.cli.options import (
    CHECK_JSON,
    CONFIG,
    JSON,
    OVERRIDES,
    REPLAY,
    complete_runs,
    grouped,
    print_checks,
    replayed,
)
from rlhpc.cli.output import echo, json_text
from rlhpc.core.errors import UserError

if TYPE_CHECKING:
    from rlhpc.launch.runs.run_registry import RunEntry
    from rlhpc.launch.runs.submit import Plan

_DRY_RUN = click.option("--dry-run", is_flag=True, help="Print job script, sbatch and srun lines; submit nothing.")
_FOLLOW = click.option("--follow", is_flag=True, help="Show the run live until it ends; Ctrl-C leaves it running.")
_KEEP = click.option("--keep", is_flag=True, help="Keep a job that can never start in the queue.")
_ENTRY = click.option("--entry", default="", hidden=True, help="What the batch step calls with the run folder.")


@dataclass(frozen=True)
class RunOptions:
    """Options of ``rlhpc run`` besides its configuration."""

    check: bool
    engine: bool
    resume: bool
    as_json: bool


@dataclass(frozen=True)
class SubmitOptions:
    """Options of the commands that submit a job; see ``rlhpc.launch.runs.submit.submit``."""

    dry_run: bool
    follow: bool
    keep: bool = False
    entry: str = ""
    as_json: bool = False


@click.command()
@CONFIG
@OVERRIDES
@click.option("--check", is_flag=True, help="Check the configuration; start nothing.")
@click.option("--engine", is_flag=True, help="With --check: prove that vLLM computes the model as transformers does.")
@click.option("--resume", is_flag=True, help="Resume the run in its folder from the newest checkpoint.")
@click.option("--run-dir", metavar="FOLDER", help="Run folder; default: run_dir of CONFIG.")
@REPLAY
@CHECK_JSON
@grouped(options=RunOptions)
def run(
    *, config: str, overrides: tuple[str, ...], run_dir: str | None, replay: str | None, options: RunOptions
) -> None:
    """Run CONFIG, a YAML file, on this machine.

    KEY.SUB=VALUE overrides a key of CONFIG.
    """
    from pathlib import Path

    from rlhpc.config.load import load_with_site

    given = load_with_site(Path(config), overrides)
    loaded = replayed(given.config, replay)
    if run_dir is not None:
        loaded = loaded.model_copy(update={"run_dir": Path(run_dir)})
    if options.check:
        from rlhpc.launch.machine import profile_warnings, with_local_ranks
        from rlhpc.launch.runs.preflight import check_architectures, check_ground_truths, serving
        from rlhpc.plan.checks.run import check_config

        loaded, ranks = with_local_ranks(loaded)
        lines = check_config(loaded, prepared=loaded.prepare is None, starting=False, workdir=Path.cwd())
        lines += [("ranks", ranks)] if ranks else []
        lines += serving(loaded)
        lines += [("site", given.site.text)] if given.site else []
        proofs = check_architectures([loaded], engine=options.engine)
        warnings = [*profile_warnings(loaded), *check_ground_truths([loaded]), *proofs]
        print_checks(loaded, [*lines, *(("warning", text) for text in warnings)], as_json=options.as_json)
        return
    if options.as_json:
        raise UserError("applies to --check", where="--json", remedy="read metrics.jsonl in the run folder")
    if options.engine:
        raise UserError("applies to --check", where="--engine", remedy="leave it out: the job proves it by itself")
    from rlhpc.launch.runs.run import run_here

    sys.exit(run_here(loaded, resume=options.resume))


@click.command()
@CONFIG
@OVERRIDES
@click.option("--array", is_flag=True, help="Submit several CONFIG files as one job array, each a run of its own.")
@click.option("--run-dir", metavar="FOLDER", help="Run folder; default: run_dir of CONFIG.")
@REPLAY
@_DRY_RUN
@_FOLLOW
@_KEEP
@_ENTRY
@JSON
@grouped(options=SubmitOptions)
def submit(
    *,
    config: str,
    overrides: tuple[str, ...],
    array: bool,
    run_dir: str | None,
    replay: str | None,
    options: SubmitOptions,
) -> None:
    """Submit CONFIG, a YAML file, to Slurm as a batch job.

    KEY.SUB=VALUE overrides a key of CONFIG.
    """
    from pathlib import Path

    from rlhpc.config.load import load_with_site
    from rlhpc.launch.runs.submit import make_plan

    files = [config, *(word for word in overrides if array and "=" not in word)]
    changes = [word for word in overrides if not array or "=" in word]
    single = {"--follow": options.follow, "--run-dir": run_dir is not None, "--replay": replay is not None}
    option = next((name for name, given in single.items() if given), None)
    if array and option is not None:
        raise UserError("applies to one run only", where=option, remedy="leave it out, or submit without --array")
    loaded = [load_with_site(Path(file), changes) for file in files]
    configs = [replayed(one.config, replay) for one in loaded]
    if run_dir is not None:
        configs = [configs[0].model_copy(update={"run_dir": Path(run_dir)})]
    sites = dict.fromkeys(one.site.text for one in loaded if one.site is not None)
    submit_plan(make_plan(configs, Path.cwd(), dry_run=options.dry_run), options, sites=[*sites])


@click.command()
@click.argument("run", shell_complete=complete_runs)
@OVERRIDES
@_DRY_RUN
@_FOLLOW
@_KEEP
@_ENTRY
@JSON
@grouped(options=SubmitOptions)
def resume(*, run: str, overrides: tuple[str, ...], options: SubmitOptions) -> None:
    """Resume RUN from its newest checkpoint, as a new batch job.

    RUN is a run folder, a run name or a job id. KEY.SUB=VALUE overrides a key of its configuration.
    """
    import os

    from rlhpc.launch.runs.run_registry import find_run
    from rlhpc.launch.runs.submit import plan_again, workdir_of

    known = find_run(run)
    workdir = workdir_of(known)
    os.chdir(workdir)  # relative paths in the config start there
    submit_plan(plan_again(known, overrides, workdir, dry_run=options.dry_run), options, again=True)


@click.command()
@click.argument("runs", nargs=-1, required=True, metavar="RUN...", shell_complete=complete_runs)
@click.option("--save", is_flag=True, help="Let the ranks finish their step and checkpoint; `rlhpc resume` continues.")
@JSON
def cancel(*, runs: tuple[str, ...], save: bool, as_json: bool) -> None:
    """Cancel the jobs of runs.

    RUN is a run folder, a run name or a job id.
    """
    from rlhpc.launch.runs.cancel import cancel as cancel_job
    from rlhpc.launch.runs.run_registry import find_runs
    from rlhpc.launch.slurm.commands import require_controller

    found = [run for text in runs for run in find_runs(text)]
    require_controller()
    failed: list[UserError] = []
    done: list[dict[str, str | None]] = []
    for run in found:
        try:
            result = cancel_job(run, save=save)
        except UserError as error:
            failed.append(error)
        else:
            done.append({"name": run.name, "job_id": run.job.job_id if run.job else None, "result": result})
            if not as_json:
                echo(f"{run.name}: {result}")
    if as_json:
        echo(json_text(done))
    if failed:
        raise UserError(" | ".join(str(error) for error in failed))


def submit_plan(plan: Plan, options: SubmitOptions, *, again: bool = False, sites: Sequence[str] = ()) -> None:
    """Submit the plan and print the jobs. ``sites``: for a dry run, what comes from which site file."""
    from rlhpc.core.redaction import redact

    if options.as_json and options.follow:
        raise UserError("applies to the submission alone", where="--json", remedy="leave --follow out")
    for warning in plan.warnings:
        echo(f"rlhpc: warning: {warning}", err=True)
    if options.dry_run and options.as_json:
        parts: dict[str, Any] = {"script": redact(plan.script), "command": plan.command}
        parts |= {"srun": [*map(redact, plan.srun)], "rollout_script": redact(plan.rollout_script) or None}
        echo(json_text({**parts, "workdir": str(plan.workdir), "sites": [*sites], "warnings": [*plan.warnings]}))
        return
    if options.dry_run:
        echo(redact(plan.script), nl=False)
        echo(f"\n# submitted as: (cd {plan.workdir} && umask 077 && {plan.command})")
        for line in plan.srun:
            echo(f"# ranks are started as: {redact(line)}")
        for site in sites:
            echo(f"# from site file {site}")
        if plan.rollout_script:
            echo("\n# then the rollout jobs, with the id of the trainers' job for JOB:")
            echo(redact(plan.rollout_script), nl=False)
        return
    from rlhpc.launch.runs.submit import submit as submit_to_slurm

    runs = submit_to_slurm(plan, again=again, keep=options.keep, entry=options.entry)
    if options.as_json:
        echo(json_text(jobs_json(runs, _queue_words(runs))))
        return
    _print_jobs(runs)
    if options.follow:
        from rlhpc.launch.runs.follow import follow as watch

        sys.exit(watch(runs[0], submitted=True))


def _print_jobs(runs: Sequence[RunEntry]) -> None:
    """Job, folder, queue state and the next commands of each run."""
    ids = [run.job.job_id for run in runs if run.job]
    words = _queue_words(runs)
    for run, job_id in zip(runs, ids, strict=True):
        echo(f"submitted job {job_id}: {run.name}")
        echo(f"  folder  {run.folder.path}")
        if job_id in words:
            echo(f"  queue   {words[job_id]}")
        if run.job is not None and run.job.rollout_job:
            echo(f"  rollout job {run.job.rollout_job}, after it")
    group = ids[0] if len(ids) == 1 else ids[0].partition("_")[0]
    echo(f"  next    rlhpc status {group} | rlhpc logs {ids[0]} | rlhpc cancel {group}")


def jobs_json(runs: Sequence[RunEntry], words: Mapping[str, str]) -> list[dict[str, Any]]:
    """Job, folder and queue state of each submitted run."""
    jobs = [(run, run.job.job_id if run.job else "") for run in runs]
    return [
        {"name": run.name, "job_id": job_id, "folder": str(run.folder.path), "queue": words.get(job_id)}
        for run, job_id in jobs
    ]


def _queue_words(runs: Sequence[RunEntry]) -> dict[str, str]:
    """Queue state by job id; none if Slurm cannot be asked: the jobs are in the queue all the same."""
    from rlhpc.launch.runs.status import queue_words
    from rlhpc.launch.slurm.queue import read_jobs

    try:
        records = [run.job for run in runs if run.job]
        jobs = read_jobs([record.job_id for record in records], records[0].cluster) if records else {}
    except UserError:
        return {}
    return {job_id: queue_words(job) for job_id, job in jobs.items()}
