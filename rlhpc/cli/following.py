"""Whether a run that a command follows is over. Imports click only; the rest when it is called."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlhpc.launch.runs.run_registry import RunEntry

POLL_SECONDS = 2.0


def run_over(run: RunEntry) -> Callable[[], bool]:
    """Function that reports whether the run is over; it asks Slurm seldom (rlhpc.launch.runs.follow)."""
    from rlhpc.launch.runs.follow import FollowedJob

    followed = FollowedJob(run)

    def ended() -> bool:
        followed.look()
        return followed.is_over

    return ended
