"""Makes the deliveries to the trackers that a configuration names."""

from __future__ import annotations

from collections.abc import Sequence

from rlhpc.config.observe import TENSORBOARD
from rlhpc.config.schema import RunConfig
from rlhpc.config.trackers import MlflowSection, WandbSection
from rlhpc.core.folder import RunFolder
from rlhpc.core.imports import import_attribute
from rlhpc.observe.trackers.delivery import Delivery, tracked_run
from rlhpc.observe.trackers.facts import attachments
from rlhpc.observe.trackers.protocol import TrackedRun, Tracker


def deliveries(folder: RunFolder, config: RunConfig, names: Sequence[str]) -> list[Delivery]:
    """Deliveries to the trackers with these names, TensorBoard's aside."""
    places = {tracker.name: place for place, tracker in enumerate(config.observe.trackers)}
    return [_delivery(folder, config, places[name]) for name in names if name != TENSORBOARD]


def _delivery(folder: RunFolder, config: RunConfig, place: int) -> Delivery:
    section = config.observe.trackers[place]

    def make(run: TrackedRun) -> Tracker:
        if isinstance(section, MlflowSection):
            from rlhpc.observe.trackers.mlflow_runs import Mlflow

            return Mlflow(run, section)
        if isinstance(section, WandbSection):
            from rlhpc.observe.trackers.wandb_runs import Wandb

            return Wandb(run, section)
        function = import_attribute(section.function, f"observe.trackers.{place}.function")
        return function(run, **section.arguments)

    return Delivery(tracked_run(folder, config.name, section.name), make, lambda: attachments(folder, config))
