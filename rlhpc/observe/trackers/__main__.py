"""``python -m rlhpc.observe.trackers RUN NAME ...``: feeds these trackers of a run until standard input ends."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from rlhpc.core.folder import RunFolder
from rlhpc.core.shown import ShownOnly
from rlhpc.observe.trackers.event_files import board
from rlhpc.observe.trackers.process import Warnings, feed

_TENSORBOARD = "tensorboard"


def main(arguments: Sequence[str]) -> None:
    """Feeds the trackers."""
    folder, names = RunFolder(Path(arguments[0])), arguments[1:]
    report = Warnings(folder)
    found = [board(folder)] if _TENSORBOARD in names else []
    if set(names) - {_TENSORBOARD}:
        from rlhpc.config.load import load_config  # not before: TensorBoard alone needs neither
        from rlhpc.observe.trackers.facts import record_facts
        from rlhpc.observe.trackers.sync import deliveries

        with ShownOnly("the facts for trackers"):
            record_facts(folder, Path.cwd())
        found += deliveries(folder, load_config(folder.config), names)
    feed(folder, found, report)


if __name__ == "__main__":
    main(sys.argv[1:])
