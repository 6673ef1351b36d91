"""``rlhpc watch``. Imports click only; the rest when the command runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from rlhpc.cli.completion import complete_runs
from rlhpc.cli.echo import echo
from rlhpc.cli.status import read_statuses

if TYPE_CHECKING:
    from rich.console import Console

# Between two pictures, and between two looks at attempts; Slurm is asked less often (rlhpc.launch.runs.follow).
_SECONDS, _STATUS_SECONDS = 1.0, 5.0


@click.command()
@click.argument("run", required=False, shell_complete=complete_runs)
@click.option("--once", is_flag=True, help="Print the state once.")
def watch(*, run: str | None, once: bool) -> None:
    """Watch a run in the terminal, until it ends or Ctrl-C.

    RUN is a run folder, a run name or a job id; without RUN, the table of all runs is shown. Without a terminal, the
    state is printed once.
    """
    import contextlib

    from rlhpc.core.terminal import Terminal

    console = Terminal()
    if once or not console.is_terminal:
        _print_once(run)
    else:
        with contextlib.suppress(KeyboardInterrupt):
            _watch_all(console) if run is None else _watch(run, console)


def _print_once(run: str | None) -> None:
    from rlhpc.core.terminal import Terminal
    from rlhpc.launch.runs.status_view import overview, show
    from rlhpc.launch.runs.watch import PLAIN_COLUMNS, Watched, view

    statuses = read_statuses((run,) if run is not None else ())
    if run is None:
        show(overview(statuses))
        return
    for status in statuses:
        console = Terminal(width=PLAIN_COLUMNS, color_system=None, force_terminal=False)
        with console.capture() as captured:
            console.print(view(Watched(status.run).snapshot(status), console, plain=True))
        echo("\n".join(line.rstrip() for line in captured.get().splitlines()))


def _watch(run: str, console: Console) -> None:
    """Refreshes the panels until the run has ended; then prints them once more, to stay on the terminal."""
    import time

    from rich.live import Live

    from rlhpc.launch.runs.follow import FollowedJob
    from rlhpc.launch.runs.run_registry import find_run
    from rlhpc.launch.runs.watch import Watched, view

    known = find_run(run)
    watched, followed = Watched(known), FollowedJob(known)
    status, read = None, float("-inf")
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            if followed.look() or status is None or time.monotonic() - read >= _STATUS_SECONDS:
                status, read = followed.status(), time.monotonic()
            if followed.is_over:
                break
            live.update(view(watched.snapshot(status), console), refresh=True)
            time.sleep(_SECONDS)
    status = followed.status()
    console.print(view(watched.snapshot(status), console))


def _watch_all(console: Console) -> None:
    import time

    from rich.live import Live

    from rlhpc.launch.runs.follow import FollowedJobs
    from rlhpc.launch.runs.status_view import overview

    followed = FollowedJobs()
    with Live(console=console, auto_refresh=False) as live:
        while True:
            live.update(overview(followed.statuses()), refresh=True)
            time.sleep(2 * _SECONDS)
