"""Readings that no metric has: free disk space, size and age of the newest checkpoint.

A thread takes them, because a file system may hang: a step never waits for one.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time

from rlhpc.core.attempts import saved_steps
from rlhpc.core.folder import RunFolder
from rlhpc.core.shown import ShownOnly
from rlhpc.observe.alerts.builtin import CHECKPOINT_GIB, CHECKPOINT_MINUTES, FREE_GIB

_SECONDS = 60.0  # between two looks
_GIB = 2**30


class Readings:
    """Takes readings of a run folder once a minute, from its construction on."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder, self._began = folder, time.time()
        self._newest: dict[str, float] = {}
        self._checkpoint, self._gib, self._saved_at = -1, 0.0, self._began
        self._end = threading.Event()
        self._guard = ShownOnly("the readings of disk and checkpoints")
        threading.Thread(target=self._work, name="readings", daemon=True).start()

    @property
    def newest(self) -> dict[str, float]:
        """The newest readings by name; empty before the first."""
        return self._newest

    def close(self) -> None:
        """Ends the thread soon, without waiting for it."""
        self._end.set()

    def look(self) -> dict[str, float]:
        """Takes the readings now."""
        disk = os.statvfs(self._folder.path)
        self._look_at_checkpoint()
        age = max(0.0, time.time() - max(self._began, self._saved_at))
        return {
            FREE_GIB: disk.f_bavail * disk.f_frsize / _GIB,
            CHECKPOINT_GIB: self._gib,
            CHECKPOINT_MINUTES: age / 60,
        }

    def _look_at_checkpoint(self) -> None:
        """Measures the newest checkpoint, once."""
        step = max(saved_steps(self._folder), default=-1)
        if step in (-1, self._checkpoint):
            return
        folder = self._folder.checkpoints / f"step-{step:08d}"
        size = 0
        for parent, _, files in os.walk(folder):
            for name in files:
                with contextlib.suppress(FileNotFoundError):
                    size += os.stat(os.path.join(parent, name)).st_size
        self._checkpoint, self._gib, self._saved_at = step, size / _GIB, os.stat(folder).st_mtime

    def _work(self) -> None:
        while True:
            with self._guard:
                self._newest = self.look()
            if self._end.wait(_SECONDS):
                return
