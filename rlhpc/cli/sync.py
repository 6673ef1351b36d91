"""``rlhpc sync``. Imports click only; the rest when it runs."""

from __future__ import annotations

import click

from rlhpc.cli.completion import complete_runs
from rlhpc.cli.echo import echo


@click.command()
@click.argument("run", shell_complete=complete_runs)
@click.option("--tracker", "names", multiple=True, metavar="NAME", help="Only this tracker; can be repeated.")
@click.option("--upload", is_flag=True, help="Also upload W&B's offline runs with `wandb sync`.")
def sync(*, run: str, names: tuple[str, ...], upload: bool) -> None:
    """Send the steps of a run that its trackers lack.

    RUN is a run folder, a run name or a job id. A run feeds its trackers itself: this is for a tracker that failed,
    was killed or has been added since, and for W&B without internet on the nodes.
    """
    from rlhpc.config.load import load_config
    from rlhpc.core.errors import UserError, did_you_mean
    from rlhpc.launch.runs.run_registry import find_run
    from rlhpc.observe.trackers.sync import sync_tracker, wandb_command

    folder = find_run(run).folder
    config = load_config(folder.config)
    known = config.observe.tracker_names()
    for name in names:
        if name not in known:
            raise UserError(f"no tracker {name!r}", where="--tracker", remedy=did_you_mean(name, known))
    if not known:
        raise UserError("the run has no trackers", where=run, remedy="set observe.trackers in its config.yaml")
    failed: list[UserError] = []
    for name in names or known:
        try:
            echo(f"{name}: {sync_tracker(folder, config, name)} steps sent")
            if command := wandb_command(folder, config, name, upload=upload):
                echo(f"upload with: {command}")
        except UserError as error:
            failed.append(error)
    if failed:
        raise UserError(" | ".join(map(str, failed)))
