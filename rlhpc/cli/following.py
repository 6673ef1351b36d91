"""Whether a run that a command follows is over. Imports click only; the rest when it is called."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from rlhpc.cli.echo import echo
from rlhpc.core.errors import UserError

if TYPE_CHECKING:
    from rlhpc.launch.runs.run_registry import RunEntry

POLL_SECONDS = 2.0


def run_over(run: RunEntry) -> Callable[[], bool]:
    """Function that reports whether the run is over; it asks Slurm every few seconds only.

    Jobs continue without a controller: while none answers, the run is not over.
    """
    import time

    from rlhpc.launch.run_lock import is_locked
    from rlhpc.launch.slurm.queue import read_job

    asked, over, reported = float("-inf"), False, ""

    def ended() -> bool:
        nonlocal asked, over, reported
        if not over and time.monotonic() - asked > POLL_SECONDS:
            if run.job is None:
                over = not is_locked(run.folder)
            else:
                try:
                    job = read_job(run.job.job_id)
                    over, reported = job is None or not job.live, ""
                except UserError as error:
                    if str(error) != reported:
                        echo(f"rlhpc: {error}", err=True)
                    reported = str(error)
            asked = time.monotonic()
        return over

    return ended
