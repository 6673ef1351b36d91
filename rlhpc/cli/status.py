"""``rlhpc status`` and ``logs``. Imports click only; the rest when a command runs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from rlhpc.cli.options import JSON, complete_runs, grouped
from rlhpc.cli.output import echo
from rlhpc.core.errors import UserError

if TYPE_CHECKING:
    from rlhpc.launch.runs.run_registry import RunEntry
    from rlhpc.launch.runs.status import RunStatus


def run_over(run: RunEntry) -> Callable[[], bool]:
    """Function that reports whether the run is over; it asks Slurm seldom (rlhpc.launch.runs.follow)."""
    from rlhpc.launch.runs.follow import FollowedJob

    followed = FollowedJob(run)

    def ended() -> bool:
        followed.look()
        return followed.is_over

    return ended


@click.command()
@click.argument("runs", nargs=-1, metavar="[RUN]...", shell_complete=complete_runs)
@JSON
@click.option("--follow", is_flag=True, help="Show one run live until it ends; Ctrl-C leaves it running.")
def status(*, runs: tuple[str, ...], as_json: bool, follow: bool) -> None:
    """Show the state of runs.

    RUN is a run folder, a run name or a job id; without RUN, all of your jobs are shown, and the runs of
    `rlhpc run` in the folder runs.
    """
    from rlhpc.cli.output import json_text
    from rlhpc.launch.runs import status as states

    if follow:
        from rlhpc.launch.runs.follow import follow as watch
        from rlhpc.launch.runs.run_registry import find_run

        if as_json or len(runs) != 1:
            raise UserError("shows one run, not as JSON", where="--follow", remedy="give one RUN, and leave --json out")
        sys.exit(watch(find_run(runs[0])))
    found = read_statuses(runs)
    if as_json:
        echo(json_text([states.as_json(one) for one in found]))
        return
    from rlhpc.launch.runs.status_view import details, overview, show

    show(details(found[0]) if len(runs) == 1 and len(found) == 1 else overview(found))


@dataclass(frozen=True)
class _Choice:
    """Options on which log of a run is shown."""

    attempt: int | None
    rank: int | None
    all_ranks: bool
    job: bool


@click.command()
@click.argument("run", shell_complete=complete_runs)
@click.option("--rank", type=int, help="Log of this rank instead of the one that failed first.")
@click.option("--attempt", type=int, metavar="N", help="Log of attempt N; default: the last one.")
@click.option("--all", "all_ranks", is_flag=True, help="Logs of the other ranks too, after the first.")
@click.option("--job", is_flag=True, help="Log of the batch step: setup, supervisor, srun.")
@click.option("--lines", type=click.IntRange(min=1), default=40, show_default=True, help="Lines from the end of each.")
@click.option("--follow", is_flag=True, help="Continue with new output until the run ends.")
@JSON
@grouped(choice=_Choice)
def logs(*, run: str, choice: _Choice, lines: int, follow: bool, as_json: bool) -> None:
    """Show the logs of a run.

    RUN is a run folder, a run name or a job id. The log of the rank that failed first comes first.
    """
    from rlhpc.cli.output import json_text
    from rlhpc.core.text import log_text
    from rlhpc.launch.runs.logs import batch_log, follow_log, log_files, tail
    from rlhpc.launch.runs.run_registry import find_run

    if as_json and follow:
        raise UserError("applies to what is there, not to new output", where="--json", remedy="leave --follow out")
    known = find_run(run)
    files = (
        [batch_log(known)] if choice.job else log_files(known, choice.attempt, choice.rank, all_ranks=choice.all_ranks)
    )
    ends = []
    if as_json:
        found = [(file, tail(file.path, lines)[0]) for file in files]
        named = [{"title": file.title, "path": str(file.path), "lines": text.splitlines()} for file, text in found]
        echo(json_text(named))
        return
    for file in files:
        text, end = tail(file.path, lines)
        echo(f"==> {file.title}: {file.path} <==\n{log_text(text)}", nl=False)
        ends.append(end)
    if not follow:
        return
    try:
        for text in follow_log(files[0].path, ends[0], run_over(known)):
            echo(log_text(text), nl=False)
    except KeyboardInterrupt:
        echo()


def read_statuses(names: tuple[str, ...]) -> list[RunStatus]:
    """State of these runs, or of all; from their folders alone if Slurm does not answer."""
    from rlhpc.launch.runs.run_registry import all_runs, find_runs, local_runs
    from rlhpc.launch.runs.status import run_status, statuses
    from rlhpc.launch.slurm.commands import require_controller
    from rlhpc.launch.slurm.queue import read_job, read_jobs

    found = [run for text in names for run in find_runs(text)] if names else [*all_runs(), *local_runs()]
    try:
        if any(run.job for run in found):
            require_controller()
        if len(names) == 1 and len(found) == 1 and found[0].job:
            job = found[0].job
            status = read_job(job.job_id, job.cluster, detail=True)
            others = read_jobs([job.rollout_job], job.cluster) if job.rollout_job else {}
            return [run_status(found[0], status, rollout_jobs=[*others.values()])]
        return statuses(found)
    except UserError as error:
        echo(f"rlhpc: {error}", err=True)
        echo("rlhpc: the following is from the run folders alone", err=True)
        return [run_status(run, None, asked=False) for run in found]
