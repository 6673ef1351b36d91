"""Deliveries to the trackers that a configuration names."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from rlhpc.config.observe import TENSORBOARD, MlflowSection, OwnTrackerSection, WandbSection
from rlhpc.config.schema import RunConfig
from rlhpc.core.errors import UserError, did_you_mean
from rlhpc.core.folder import RunFolder
from rlhpc.core.imports import import_attribute
from rlhpc.core.records import Position
from rlhpc.observe.trackers.delivery import Delivery, board
from rlhpc.observe.trackers.facts import attachments
from rlhpc.observe.trackers.steps import Step, TrackedRun, Tracker, later

_AT_ONCE = 100  # steps in one call: a tracker that fails in a long run does not begin at its start again


class Own(Tracker):
    """A tracker of the user's: a function that takes steps, which are kept when it returns."""

    def __init__(self, run: TrackedRun, section: OwnTrackerSection, where: str) -> None:
        self._run, self._log = run, import_attribute(section.function, where)(run, **section.arguments)

    def log(self, steps: Sequence[Step], again: Position | None) -> None:
        """Passes on the steps after the remembered one. The last call before a kill may come again."""
        new = later(steps, self._run.newest())
        for first in range(0, len(new), _AT_ONCE):
            some = new[first : first + _AT_ONCE]
            self._log(some)
            self._run.remember(some[-1].position)


def deliveries(folder: RunFolder, config: RunConfig, names: Sequence[str] = ()) -> list[Delivery]:
    """Deliveries to the trackers with these names, by default all. Raises UserError."""
    known = config.observe.tracker_names()
    if not known:
        raise UserError("no trackers", where=str(folder.config), remedy="set observe.trackers in it")
    for name in names:
        if name not in known:
            raise UserError("no such tracker", where=name, remedy=did_you_mean(name, known))
    attached = partial(attachments, folder, config)
    return [Delivery(folder, name, partial(_tracker, folder, config, name), attached) for name in names or known]


def _tracker(folder: RunFolder, config: RunConfig, name: str) -> Tracker:
    """Tracker of a name. Only here its library is imported."""
    if name == TENSORBOARD:
        return board(folder)
    run = TrackedRun.of(folder, config.name, name)
    place, section = next((place, each) for place, each in enumerate(config.observe.trackers) if each.name == name)
    if isinstance(section, MlflowSection):
        from rlhpc.observe.trackers.mlflow_runs import Mlflow

        return Mlflow(run, section)
    if isinstance(section, WandbSection):
        from rlhpc.observe.trackers.wandb_runs import Wandb

        return Wandb(run, section)
    return Own(run, section, f"observe.trackers.{place}.function")
