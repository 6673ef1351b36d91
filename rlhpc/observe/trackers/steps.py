"""Steps of metrics.jsonl as trackers take them, and the interface of trackers."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rlhpc.core.files import make_folder, read_json, write_json
from rlhpc.core.folder import RunFolder
from rlhpc.core.records import PHASES, MetricsFile, Position, Record, number
from rlhpc.core.storage import patiently

_NO_METRICS = frozenset({"phase", "step", "total_steps", "time"})


@dataclass(frozen=True)
class Step:
    """Metrics of a step, whose names begin with the phase.

    ``place`` is its position on one axis for both phases: RL steps follow the supervised ones. Step 0 of RL, the first
    validation, shares the place of the last supervised step. ``time``: when the step was recorded, in seconds since
    1970.
    """

    phase: str
    step: int
    place: int
    time: float
    metrics: dict[str, float]

    @property
    def position(self) -> Position:
        """Orders the steps of a run."""
        return PHASES.index(self.phase), self.step


class Follower:
    """Reads the steps of metrics.jsonl as it grows."""

    def __init__(self, path: Path) -> None:
        self._path, self._file, self._sft_steps = path, MetricsFile(path).follow(), 0

    def read(self) -> tuple[list[Step], Position | None]:
        """Steps since the last call, in order, at first all; and where steps come again."""
        records, again = patiently(self._file.read, self._path)
        return [step for record in records if (step := self._step(record)) is not None], again

    def _step(self, record: Record) -> Step | None:
        phase, step, at = record["phase"], record["step"], number(record.get("time"))
        if at is None:
            return None
        if phase == "sft":
            self._sft_steps = step
        values = ((f"{phase}/{name}", number(value)) for name, value in record.items() if name not in _NO_METRICS)
        metrics = {name: value for name, value in values if value is not None}
        return Step(phase, step, step if phase == "sft" else self._sft_steps + step, at, metrics)


def later(steps: Sequence[Step], newest: Position | None) -> list[Step]:
    """Steps after ``newest``."""
    return [step for step in steps if newest is None or step.position > newest]


# End of the run's last attempt; "open": the run may continue.
Outcome = Literal["finished", "stopped", "failed", "open"]


def read_state(folder: RunFolder, tracker: str) -> dict[str, Any]:
    """State that a tracker was left in; empty without any."""
    try:
        return dict(read_json(folder.trackers.state(tracker)))
    except (FileNotFoundError, ValueError, TypeError):
        return {}


@dataclass(frozen=True)
class TrackedRun:
    """The run that a tracker shows. ``id`` is the same each time the run is resumed, and unique to run and tracker."""

    name: str
    id: str
    folder: RunFolder
    tracker: str

    @classmethod
    def of(cls, folder: RunFolder, name: str, tracker: str) -> TrackedRun:
        """The run with the id of earlier attempts, or a new one."""
        known = read_state(folder, tracker).get("id")
        run = cls(name, known or uuid.uuid4().hex[:16], folder, tracker)
        if not known:
            make_folder(folder.trackers.path)
            run.remember(None)
        return run

    def newest(self) -> Position | None:
        """The newest step that was remembered."""
        known = read_state(self.folder, self.tracker).get("newest")
        return known and (known[0], known[1])

    def remember(self, newest: Position | None) -> None:
        """Writes the newest step that the tracker has for certain."""
        write_json(self.folder.trackers.state(self.tracker), {"id": self.id, "newest": newest})


class Tracker:
    """Takes the steps of one run. If a method raises, the tracker is closed and made again later."""

    def log(self, steps: Sequence[Step], again: Position | None) -> None:
        """Takes further steps in order, at first all of the run; those from ``again`` on replace earlier ones."""
        raise NotImplementedError

    def attach(self, settings: Mapping[str, str], files: Sequence[Path]) -> None:
        """Takes the keys of the resolved configuration with their values, and files to attach; replaces those of
        earlier calls."""

    def close(self, outcome: Outcome) -> None:
        """Ends the tracker's run, which a later object may open again."""
