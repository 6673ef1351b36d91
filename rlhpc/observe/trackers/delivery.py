"""Delivers the steps of a run to one tracker, from where the tracker's last step ends, in one process at a time."""

from __future__ import annotations

import contextlib
import fcntl
import os
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from rlhpc.core import owner_lock
from rlhpc.core.attempts import folders, read_verdict
from rlhpc.core.files import make_folder, read_json, write_json
from rlhpc.core.folder import RunFolder
from rlhpc.observe.trackers.protocol import Feed, MetricsPoint, Outcome, Position, Rewriter, TrackedRun, Tracker, after


@contextlib.contextmanager
def held(folder: RunFolder) -> Iterator[bool]:
    """True if the lock was free; it is held in the context, or until this process ends."""
    make_folder(folder.trackers.path)
    descriptor = os.open(folder.trackers.lock, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        except OSError as error:
            if error.errno not in owner_lock.NO_LOCKS:
                raise
            lock = owner_lock.take(folder.trackers.lock)
            with lock or contextlib.nullcontext():
                yield lock is not None
        else:
            yield True
    finally:
        os.close(descriptor)


Maker = Callable[[TrackedRun], Tracker]
_AT_ONCE = 100  # steps in one call: a tracker that fails in a long run does not begin at its start again


class Delivery:
    """The steps of a run on their way to one tracker.

    After an error the tracker is made again and asked for its newest step, so that ``deliver`` can be repeated.
    """

    def __init__(self, run: TrackedRun, make: Maker, attachments: Callable[[], tuple[dict[str, str], list[Path]]]):
        self._run, self._make, self._attachments = run, make, attachments
        self._tracker: Tracker | None = None
        self._feed = Feed(run.folder.metrics)
        self._newest: Position | None = None
        self.sent = 0
        self.trouble: Exception | None = None  # of attaching, which must not keep steps back

    @property
    def name(self) -> str:
        """Name of the tracker."""
        return self._run.tracker

    def deliver(self) -> None:
        """Sends the steps that are new. The tracker is made when there is a first one."""
        try:
            self._deliver()
        except BaseException:
            tracker, self._tracker = self._tracker, None
            with contextlib.suppress(Exception):
                if tracker is not None:
                    tracker.close("open")
            raise

    def finish(self) -> None:
        """Sends what is left, attaches what the end of the run has written, and ends the tracker's run."""
        self.deliver()
        if self._tracker is not None:
            self._attach()
            tracker, self._tracker = self._tracker, None
            tracker.close(outcome_of(self._run.folder))

    def _deliver(self) -> None:
        if self._tracker is None:
            self._feed = Feed(self._run.folder.metrics)
            points, whole = self._feed.read()
            if not points:
                return
            self._tracker = self._make(self._run)
            self._newest = self._tracker.newest()
            self._attach()
        else:
            points, whole = self._feed.read()
        if whole and isinstance(self._tracker, Rewriter):
            self.sent += self._tracker.rewrite(points)
            self._newest = self._tracker.newest()
        self._log(after(points, self._newest))

    def _log(self, points: Sequence[MetricsPoint]) -> None:
        assert self._tracker is not None
        for first in range(0, len(points), _AT_ONCE):
            some = points[first : first + _AT_ONCE]
            self._tracker.log(some)
            self._newest = some[-1].position
            self.sent += len(some)

    def _attach(self) -> None:
        if hasattr(self._tracker, "attach"):
            try:
                self._tracker.attach(*self._attachments())
            except Exception as error:
                self.trouble = error


def tracked_run(folder: RunFolder, name: str, tracker: str) -> TrackedRun:
    """The run as the tracker of this name knows it; makes its id if it has none yet."""
    make_folder(folder.trackers.path)
    state = folder.trackers.state(tracker)
    with contextlib.suppress(FileNotFoundError, ValueError, KeyError, TypeError):
        return TrackedRun(name, str(read_json(state)["id"]), folder, tracker)
    made = TrackedRun(name, uuid.uuid4().hex[:16], folder, tracker)
    write_json(state, {"id": made.id})
    return made


def outcome_of(folder: RunFolder) -> Outcome:
    """End of the last attempt."""
    known = folders(folder)
    verdict = read_verdict(known[-1]) if known else None
    if verdict is None or verdict.action in ("retry", "requeue"):
        return "open"
    if verdict.cause in ("finished", "stopped"):
        return "finished" if verdict.cause == "finished" else "stopped"
    return "failed" if verdict.action == "stop" else "open"
