"""``rlhpc replay``. Imports click only; the rest when it runs."""

from __future__ import annotations

import sys

import click


@click.command()
@click.argument("run")
@click.argument("update", required=False)
@click.option("--step", type=int, metavar="N", help="Weights of the checkpoint of this step; default: the newest.")
def replay(run: str, update: str | None, step: int | None) -> None:
    """Repeat the forward and backward pass of a skipped update of RUN (folder, name or job's id), and report which
    sequences are not finite.

    UPDATE is a folder in RUN/skipped_updates; default: the newest. Ranks start on this machine, as many as made the
    update.
    """
    from rlhpc.launch.runs.replay import replay_here

    sys.exit(replay_here(run, update, step))
