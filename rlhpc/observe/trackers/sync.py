"""Deliveries to the trackers that a configuration names, beside a run and after it."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from rlhpc.config.observe import TENSORBOARD, MlflowSection, WandbSection
from rlhpc.config.schema import RunConfig
from rlhpc.core.errors import UserError
from rlhpc.core.folder import RunFolder
from rlhpc.core.imports import import_attribute
from rlhpc.observe.trackers.delivery import Delivery, held, tracked_run
from rlhpc.observe.trackers.event_files import board
from rlhpc.observe.trackers.facts import attachments
from rlhpc.observe.trackers.process import reason_of
from rlhpc.observe.trackers.protocol import TrackedRun, Tracker
from rlhpc.observe.trackers.wandb_runs import files_of


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


_SYNCED = "*.synced"  # beside a file that `wandb sync` has uploaded


def sync_tracker(folder: RunFolder, config: RunConfig, name: str) -> int:
    """Sends the steps that the tracker lacks; returns their number."""
    with held(folder) as free:
        if not free:
            raise UserError(
                "the run feeds its trackers itself",
                where=f"tracker {name}",
                remedy="wait for its end, or cancel it",
            )
        delivery = board(folder) if name == TENSORBOARD else deliveries(folder, config, [name])[0]
        return _sent(delivery)


def _sent(delivery: Delivery) -> int:
    try:
        delivery.finish()
    except UserError:
        raise
    except ImportError as error:
        extra = f"pip install 'rlhpc[{delivery.name}]'"
        raise UserError(reason_of(error), where=f"tracker {delivery.name}", remedy=extra) from error
    except Exception as error:  # a library's own
        raise UserError(
            reason_of(error), where=f"tracker {delivery.name}", remedy="call `rlhpc sync` again when it can be reached"
        ) from error
    if delivery.trouble is not None:
        raise UserError(f"has no files attached: {reason_of(delivery.trouble)}", where=f"tracker {delivery.name}")
    return delivery.sent


def wandb_command(folder: RunFolder, config: RunConfig, name: str, *, upload: bool) -> str | None:
    """Command that uploads the offline runs of a W&B tracker; None if there is nothing to upload. ``upload``: runs it,
    and raises UserError if it fails."""
    section = next((tracker for tracker in config.observe.trackers if tracker.name == name), None)
    if not isinstance(section, WandbSection):
        return None
    runs = [run for run in files_of(folder.trackers.files(name)) if not any(run.glob(_SYNCED))]
    if not runs:
        return None
    arguments = ["sync", *map(str, runs)]
    if not upload:
        return shlex.join(["wandb", *arguments])
    program = Path(sys.executable).with_name("wandb")
    if subprocess.run([program, *arguments]).returncode:
        raise UserError(
            "`wandb sync` failed, see above",
            where=f"tracker {name}",
            remedy="set WANDB_API_KEY or call `wandb login`, on a machine with internet",
        )
    return None
