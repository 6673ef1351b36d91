"""``rlhpc replay``. Imports click only; the rest when it runs."""

from __future__ import annotations

import sys

import click


@click.command()
@click.argument("run")
@click.argument("update", required=False)
@click.option("--step", type=int, metavar="N", help="Checkpoint to take the weights from; default: the newest.")
def replay(run: str, update: str | None, step: int | None) -> None:
    """Replay a skipped update and report non-finite sequences.

    Repeats the forward and backward pass with as many ranks as made the update, on this machine. RUN is a run folder, a
    run name or a job id; UPDATE is a folder in RUN/skipped_updates, by default the newest.
    """
    from rlhpc.launch.runs.replay import replay_here

    sys.exit(replay_here(run, update, step))
