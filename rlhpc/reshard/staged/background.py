"""A thread whose error is raised in the main thread."""

from __future__ import annotations

import threading
from collections.abc import Callable

from rlhpc.core.errors import ReshardError
from rlhpc.core.heartbeat import enter
from rlhpc.parallel.waits import leave_out_this_thread

_LOOK_SECONDS = 0.5


class Background:
    """Runs ``work`` in a thread. ``changed``: guards what both threads share, and is notified at the thread's end."""

    def __init__(self, name: str, work: Callable[[], None]) -> None:
        self.changed = threading.Condition()
        self._work = work
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def check(self) -> None:
        """Raises a ReshardError if the thread has failed."""
        if self._error is not None:
            raise ReshardError(f"{self._thread.name}: {self._error}") from self._error

    def wait(self, reached: Callable[[], bool], phase: str, check: Callable[[], object] | None = None) -> None:
        """Waits; not progress, as ``phase``. Raises a ReshardError if the thread fails before ``reached``, and what
        ``check`` raises, which is called now and then."""
        with self.changed:
            while not reached():
                self.check()
                if check is not None:
                    check()
                enter(phase)
                self.changed.wait(_LOOK_SECONDS)

    def join(self, seconds: float | None = None) -> bool:
        """Waits for the thread to end; returns whether it has."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        leave_out_this_thread()
        try:
            self._work()
        except BaseException as error:
            self._error = error
        with self.changed:
            self.changed.notify_all()
