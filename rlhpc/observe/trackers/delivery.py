"""Delivers the steps of a run to one tracker, from where the tracker's last step ends."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from rlhpc.core.attempts import folders, read_verdict
from rlhpc.core.errors import one_line
from rlhpc.core.folder import RunFolder
from rlhpc.core.redaction import redact
from rlhpc.observe.trackers.steps import Follower, Outcome, Tracker

_POLL_SECONDS = 1.0
_FIRST_PAUSE, _LONGEST_PAUSE = 2.0, 60.0  # after a failure
_LONGEST = 300  # characters of a reported error
Attachments = tuple[dict[str, str], Sequence[Path]]


class Delivery:
    """The steps of a run on their way to one tracker, which is made when there is a first step.

    After an error it is made again, and begins where its last step ends: ``deliver`` can be repeated.
    """

    def __init__(
        self,
        folder: RunFolder,
        name: str,
        make: Callable[[], Tracker],
        attachments: Callable[[], Attachments] = lambda: ({}, ()),
    ) -> None:
        self.name, self.failure = name, ""
        self._folder, self._make, self._attachments = folder, make, attachments
        self._tracker: Tracker | None = None
        self._follower = Follower(folder.metrics)

    def deliver(self, *, last: bool = False) -> None:
        """Sends the steps that are new; if ``last``, also attaches the files of the run's end, and ends its run."""
        try:
            steps, again = self._follower.read()
            if self._tracker is None and steps:
                self._tracker = self._make()
                self._attach(self._tracker)
            if self._tracker is not None:
                self._tracker.log(steps, again)
                if last:
                    self._attach(self._tracker)
                    self._tracker.close(outcome_of(self._folder))
        except Exception:
            tracker, self._tracker, self._follower = self._tracker, None, Follower(self._folder.metrics)
            with contextlib.suppress(Exception):
                if tracker is not None:
                    tracker.close("open")
            raise

    def run(self, ended: threading.Event) -> None:
        """Delivers until the end. The first failure is kept for a report, and delivery is tried again."""
        pause, last = _FIRST_PAUSE, False
        while not last:
            last = ended.is_set()
            try:
                self.deliver(last=last)
            except Exception as error:
                self._fail("failed", error)
                ended.wait(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
            else:
                ended.wait(_POLL_SECONDS)
                pause = _FIRST_PAUSE

    def _attach(self, tracker: Tracker) -> None:
        """Attaches files. A failure keeps no steps back."""
        try:
            tracker.attach(*self._attachments())
        except Exception as error:
            self._fail("has no files attached", error)

    def _fail(self, what: str, error: Exception) -> None:
        reason = redact(one_line(f"{type(error).__name__}: {error}"))[:_LONGEST]
        self.failure = self.failure or f"tracker {self.name} {what}: {reason}"


def board(folder: RunFolder) -> Tracker:
    """TensorBoard, whose library is imported only here."""
    from rlhpc.observe.trackers.tensorboard import TensorBoard

    return TensorBoard(folder)


def outcome_of(folder: RunFolder) -> Outcome:
    """End of the last attempt."""
    known = folders(folder)
    verdict = read_verdict(known[-1]) if known else None
    if verdict is None or verdict.action in ("retry", "requeue"):
        return "open"
    if verdict.cause in ("finished", "stopped"):
        return "finished" if verdict.cause == "finished" else "stopped"
    return "failed" if verdict.action == "stop" else "open"
