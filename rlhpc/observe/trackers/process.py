"""The process beside the ranks that feeds the trackers, each in a thread of its own."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import TextIO

from rlhpc.core.errors import one_line
from rlhpc.core.files import make_folder
from rlhpc.core.folder import RunFolder
from rlhpc.core.redaction import guard_output, redact
from rlhpc.observe.trackers.delivery import Delivery, held

END_SECONDS = 10.0  # for the last steps after the run's end
_POLL_SECONDS, _LOOK_SECONDS = 1.0, 0.5
_FIRST_PAUSE, _LONGEST_PAUSE = 2.0, 60.0  # after a failure
_NICE = 10
_LOG_BYTES = 2**20
_LONGEST = 300  # characters of a reported error


class Warnings:
    """Writes warnings to the launcher's standard error; all other output of this process goes to a log."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        make_folder(folder.trackers.path)
        self._out: TextIO = os.fdopen(os.dup(2), "w", errors="backslashreplace")
        log = os.open(folder.trackers.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        for descriptor in (1, 2):
            os.dup2(log, descriptor)
        os.close(log)
        guard_output()

    def __call__(self, text: str) -> None:
        line = f"rlhpc: warning: {text}; send what is missing after the run: rlhpc sync {self._folder.path}"
        for out in (self._out, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                print(line, file=out, flush=True)

    def cut_log(self) -> None:
        """Empties the log if it is too long."""
        with contextlib.suppress(OSError):
            if os.fstat(2).st_size > _LOG_BYTES:
                os.ftruncate(2, 0)


def reason_of(error: Exception) -> str:
    """The error in a line, without secrets."""
    return redact(one_line(f"{type(error).__name__}: {error}"))[:_LONGEST]


class Feeder(threading.Thread):
    """Delivers to one tracker until ``ended`` is set, and then what is left.

    The first failure is reported, and delivery is tried again.
    """

    def __init__(self, delivery: Delivery, ended: threading.Event, report: Callable[[str], None]) -> None:
        super().__init__(name=delivery.name, daemon=True)
        self._delivery, self._ended, self._report = delivery, ended, report
        self._pause, self.failed = _FIRST_PAUSE, False

    def run(self) -> None:
        """Delivers until the end."""
        while not self._ended.is_set():
            done = self._try(self._delivery.deliver)
            self._ended.wait(_POLL_SECONDS if done else self._pause)
            self._pause = _FIRST_PAUSE if done else min(2 * self._pause, _LONGEST_PAUSE)
        self._try(self._delivery.finish)

    def _try(self, action: Callable[[], None]) -> bool:
        try:
            action()
        except Exception as error:
            self._report_once("failed and is tried again", error)
            return False
        if self._delivery.trouble is not None:
            self._report_once("has no files attached", self._delivery.trouble)
        return True

    def _report_once(self, what: str, error: Exception) -> None:
        if not self.failed:
            self.failed = True
            self._report(f"tracker {self._delivery.name} {what}: {reason_of(error)}")


def feed(folder: RunFolder, deliveries: Sequence[Delivery], report: Warnings, end_seconds: float = END_SECONDS) -> None:
    """Feeds the trackers until standard input ends or SIGTERM arrives, and for at most ``end_seconds`` after that.

    The launcher holds the other end of standard input, which therefore ends with the launcher. Does not return: a
    library's threads may be stuck.
    """
    ended = threading.Event()
    _listen(ended)
    with contextlib.suppress(OSError):
        os.nice(_NICE)
    lock = contextlib.ExitStack()
    while not lock.enter_context(held(folder)):  # `rlhpc sync` is at work
        lock.close()
        _look(ended)
        if ended.is_set():
            os._exit(0)
    feeders = [Feeder(delivery, ended, report) for delivery in deliveries]
    for feeder in feeders:
        feeder.start()
    while not ended.is_set():
        _look(ended)
        report.cut_log()
    deadline = time.monotonic() + end_seconds
    for feeder in feeders:
        feeder.join(max(0.0, deadline - time.monotonic()))
    slow = [feeder.name for feeder in feeders if feeder.is_alive()]
    if slow:
        report(f"tracker {', '.join(slow)} has not taken all steps within {end_seconds:g} s")
    os._exit(0)


def _look(ended: threading.Event) -> None:
    """Waits a moment for the end of standard input."""
    if select.select([0], [], [], _LOOK_SECONDS)[0] and not os.read(0, 1):
        ended.set()


def _listen(ended: threading.Event) -> None:
    """Handles the signals that a terminal, Slurm and the launcher send."""

    def end(signum: int, frame: FrameType | None) -> None:
        ended.set()

    signal.signal(signal.SIGTERM, end)
    for signum in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(signum, signal.SIG_IGN)
