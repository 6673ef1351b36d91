"""``rlhpc replay``. Imports click only; the rest when it runs."""

from __future__ import annotations

import sys

import click

from rlhpc.cli.completion import complete_runs
from rlhpc.cli.json_text import run_printing
from rlhpc.cli.options import JSON


@click.command()
@click.argument("run", shell_complete=complete_runs)
@click.argument("update", required=False)
@click.option("--step", type=int, metavar="N", help="Checkpoint to take the weights from; default: the newest.")
@JSON
def replay(*, run: str, update: str | None, step: int | None, as_json: bool) -> None:
    """Replay a skipped update and report non-finite sequences.

    Repeats the forward and backward pass with as many ranks as made the update, on this machine. RUN is a run folder, a
    run name or a job id; UPDATE is a folder in RUN/skipped_updates, by default the newest.
    """
    from rlhpc.core.folder import RunFolder
    from rlhpc.launch.runs.derived_runs import replay_here, replay_of

    config = replay_of(run, update, step)
    sys.exit(run_printing(lambda: replay_here(config), RunFolder(config.folder).replayed, as_json=as_json))
