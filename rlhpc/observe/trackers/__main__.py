"""Sends the steps that trackers of a run lack: ``python -m rlhpc.observe.trackers RUN_FOLDER [TRACKER ...]``.

With ``--follow`` it is the process that the launcher starts, which feeds these trackers until standard input ends.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TextIO

from rlhpc.core.errors import EXIT_USER_ERROR, UserError
from rlhpc.core.files import make_folder
from rlhpc.core.folder import RunFolder
from rlhpc.core.redaction import guard_output
from rlhpc.core.shown import ShownOnly, show
from rlhpc.observe.trackers.delivery import Delivery, board

END_SECONDS = 10.0  # for the last steps after the run's end
_LOOK_SECONDS = 0.5
_NICE = 10
_LOG_BYTES = 2**20
_TENSORBOARD = "tensorboard"


def main(arguments: Sequence[str]) -> int:
    """Sends or feeds; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m rlhpc.observe.trackers", description="Sends the steps that trackers of a run lack."
    )
    parser.add_argument("run", type=Path, metavar="RUN_FOLDER")
    parser.add_argument("names", nargs="*", metavar="TRACKER", help="name of a tracker; default: all")
    parser.add_argument("--follow", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    folder = RunFolder(given.run)
    if given.follow:
        warnings = redirect_output(folder)
        feed(folder, _followed(folder, given.names), warnings)
    from rlhpc.config.load import load_config
    from rlhpc.observe.trackers.libraries import deliveries

    try:
        failures = [_send(delivery) for delivery in deliveries(folder, load_config(folder.config), given.names)]
    except UserError as error:
        show(f"rlhpc: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    for failure in filter(None, failures):
        show(f"rlhpc: {failure}; remove the cause and send again", file=sys.stderr)
    return EXIT_USER_ERROR if any(failures) else 0


def _send(delivery: Delivery) -> str:
    """Sends what one tracker lacks; returns its failure."""
    ended = threading.Event()
    ended.set()
    delivery.run(ended)
    if not delivery.failure:
        show(f"{delivery.name}: has all steps")
    return delivery.failure


def _followed(folder: RunFolder, names: Sequence[str]) -> list[Delivery]:
    if set(names) <= {_TENSORBOARD}:
        return [Delivery(folder, _TENSORBOARD, partial(board, folder))]
    from rlhpc.config.load import load_config  # not before: TensorBoard alone needs neither
    from rlhpc.observe.trackers.facts import record_facts
    from rlhpc.observe.trackers.libraries import deliveries

    with ShownOnly("the facts for trackers"):
        record_facts(folder, Path.cwd())
    return deliveries(folder, load_config(folder.config), names)


def redirect_output(folder: RunFolder) -> TextIO:
    """Sends all output of this process to a log; returns the launcher's standard error, for warnings."""
    make_folder(folder.trackers.path)
    warnings = os.fdopen(os.dup(2), "w", errors="backslashreplace")
    log = os.open(folder.trackers.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    os.close(log)
    guard_output()
    return warnings


def feed(folder: RunFolder, deliveries: Sequence[Delivery], warnings: TextIO) -> None:
    """Feeds the trackers until standard input ends or SIGTERM arrives, and for at most ``END_SECONDS`` after that.

    The launcher holds the other end of standard input, which therefore ends with the launcher. Does not return: a
    library's threads may be stuck.
    """
    ended, reported = _listen(), set[str]()
    with contextlib.suppress(OSError):
        os.nice(_NICE)

    def report(failures: Sequence[str]) -> None:
        for failure in set(failures) - reported - {""}:
            reported.add(failure)
            line = f"rlhpc: warning: {failure}; send what is missing after the run: {folder.trackers.command}"
            for out in (warnings, sys.stderr):
                with contextlib.suppress(OSError, ValueError):
                    print(line, file=out, flush=True)

    threads = [threading.Thread(target=each.run, args=(ended,), name=each.name, daemon=True) for each in deliveries]
    for thread in threads:
        thread.start()
    while not ended.is_set():
        if select.select([0], [], [], _LOOK_SECONDS)[0] and not os.read(0, 1):
            ended.set()
        report([each.failure for each in deliveries])
        with contextlib.suppress(OSError):
            if os.fstat(2).st_size > _LOG_BYTES:
                os.ftruncate(2, 0)
    deadline = time.monotonic() + END_SECONDS
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    slow = [
        f"tracker {thread.name} has not taken all steps within {END_SECONDS:g} s"
        for thread in threads
        if thread.is_alive()
    ]
    report([*(each.failure for each in deliveries), *slow])
    os._exit(0)


def _listen() -> threading.Event:
    """Event that a terminal's, Slurm's and the launcher's signal to end sets."""
    ended = threading.Event()

    def end(signum: int, frame: FrameType | None) -> None:
        ended.set()

    signal.signal(signal.SIGTERM, end)
    for signum in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(signum, signal.SIG_IGN)
    return ended


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
