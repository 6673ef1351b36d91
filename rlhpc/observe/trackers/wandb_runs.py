"""A run of Weights & Biases: files in the run folder, or the server."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

from rlhpc.config.observe import WandbSection
from rlhpc.core import env
from rlhpc.core.files import make_folder, names_in
from rlhpc.core.records import PHASES, Position
from rlhpc.observe.trackers.steps import Outcome, Step, TrackedRun, Tracker, later

# W&B records nothing by itself: neither the machine, the command line, the repository with its URL, nor the output.
_OFF = (
    "disable_code",
    "disable_git",
    "disable_job_creation",
    "x_disable_machine_info",
    "x_disable_meta",
    "x_disable_stats",
)
_SETTINGS = {
    **dict.fromkeys(_OFF, True),
    "console": "off",
    "silent": True,
    "save_code": False,
    "x_save_requirements": False,
}
_FLUSH_SECONDS = 1.0  # W&B's 15 are more than _KEPT_SECONDS
_KEPT_SECONDS = 10.0  # after which a row survives a kill for certain


class Wandb(Tracker):
    """The W&B run with the id of our run.

    W&B starts a new file whenever an offline run is opened again, and its server drops steps that go back. A killed
    process loses its last rows: the next one begins after those that were logged 10 s before. The charts' axis is the
    step of each phase.
    """

    def __init__(self, run: TrackedRun, section: WandbSection) -> None:
        if "wandb" not in sys.modules:  # a service of another process may be gone, or be left with our run
            os.environ.pop(env.WANDB_SERVICE, None)
        import wandb

        folder = run.folder.trackers.files(section.name)
        make_folder(folder)
        if names_in(folder / "wandb", "*run-*"):
            time.sleep(1.0)  # W&B names a run's folder by the second of its start, and would write over another one
        self._tracked, self._newest = run, run.newest()
        self._remembered, self._logged = self._newest, deque[tuple[float, Position | None]]()
        self._run = wandb.init(
            project=section.project,
            entity=section.entity,
            group=section.group,
            tags=section.tags,
            id=run.id,
            name=run.name,
            dir=str(folder),
            mode=section.mode,
            resume="allow",
            reinit="create_new",
            settings=wandb.Settings(**_SETTINGS, x_transaction_log_flush_interval=_FLUSH_SECONDS),
        )
        for phase in PHASES:
            self._run.define_metric(f"{phase}/*", step_metric=f"{phase}/step")

    def log(self, steps: Sequence[Step], again: Position | None) -> None:
        """Logs the steps that are new, each as a row that no later one is added to."""
        for step in later(steps, self._newest):
            row = {**step.metrics, f"{step.phase}/step": step.step}
            # The first validation comes after the last supervised step: rows must grow.
            self._run.log(row, step=step.place + (step.phase != PHASES[0]), commit=True)
            self._newest = step.position
        self._logged.append((time.monotonic(), self._newest))
        while self._logged[0][0] < time.monotonic() - _KEPT_SECONDS:
            self._remember(self._logged.popleft()[1])

    def attach(self, settings: Mapping[str, str], files: Sequence[Path]) -> None:
        """Sets the run's config, and copies files to those that W&B uploads."""
        self._run.config.update(dict(settings), allow_val_change=True)
        for file in files:
            copy = Path(self._run.dir, file.name)
            shutil.copyfile(file, copy)
            self._run.save(str(copy), base_path=self._run.dir, policy="now")

    def close(self, outcome: Outcome) -> None:
        """Ends the run; a later one with its id continues it."""
        self._run.finish(exit_code=1 if outcome == "failed" else 0)
        self._remember(self._newest)

    def _remember(self, newest: Position | None) -> None:
        if newest != self._remembered:
            self._tracked.remember(newest)
            self._remembered = newest
