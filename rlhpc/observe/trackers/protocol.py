"""What a tracker is: the interface of the shipped ones and of users' own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

from rlhpc.core.folder import RunFolder
from rlhpc.observe.trackers.points import MetricsPoint, Position

# How the run's last attempt ended; "open": it may go on.
Outcome = Literal["finished", "stopped", "failed", "open"]


@dataclass(frozen=True)
class TrackedRun:
    """The run that a tracker shows. ``id`` is the same each time the run is resumed, and unique to run and tracker."""

    name: str
    id: str
    folder: RunFolder
    tracker: str


@runtime_checkable
class Tracker(Protocol):
    """Takes the steps of one run. A method that raises is called again later, on a new object."""

    def newest(self) -> Position | None:
        """Phase (0: sft, 1: rl) and step of the newest step that it has; None without any. A step up to it is not
        sent again, also if a resumed run takes it again."""

    def log(self, points: Sequence[MetricsPoint]) -> None:
        """Takes further steps, in order. They are kept when it returns."""

    def attach(self, settings: Mapping[str, str], files: Sequence[Path]) -> None:
        """Takes the keys of the resolved configuration with their values, and files to attach; replaces those of
        earlier calls."""

    def close(self, outcome: Outcome) -> None:
        """Ends the tracker's run, which a later object may open again."""


@runtime_checkable
class Rewriter(Protocol):
    """A tracker that can replace steps. It takes all steps of the run first, and again when some were taken again."""

    def rewrite(self, points: Sequence[MetricsPoint]) -> int:
        """Takes all steps of the run in place of those that it has; returns how many it did not have."""
