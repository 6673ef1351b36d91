"""The delivery to TensorBoard, which needs no configuration: by default it is the only one, and starts in no time."""

from __future__ import annotations

from rlhpc.core.folder import RunFolder
from rlhpc.observe.trackers.delivery import Delivery
from rlhpc.observe.trackers.event_files import TensorBoard
from rlhpc.observe.trackers.protocol import TrackedRun


def board(folder: RunFolder) -> Delivery:
    """The delivery to TensorBoard. Nothing is attached: its files lie in the run folder beside all others."""
    run = TrackedRun("", "", folder, "tensorboard")
    return Delivery(run, lambda run: TensorBoard(run.folder), lambda: ({}, []))
