"""Alerts of a running run, on its first rank: checks each step, records what fires, and acts on it.

A thread reads what no metric has (free disk space, size and age of the newest checkpoint), because a file system may
hang: a step never waits for one.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Iterable

from rlhpc.config.schema import RunConfig
from rlhpc.core.attempts import saved_steps
from rlhpc.core.context import StopRequest
from rlhpc.core.folder import RunFolder
from rlhpc.core.records import Record, number
from rlhpc.core.shown import ShownOnly
from rlhpc.observe.alerts.builtin import CHECKPOINT_GIB, CHECKPOINT_MINUTES, FREE_GIB
from rlhpc.observe.alerts.configured import rules_of
from rlhpc.observe.alerts.notify import Notifier
from rlhpc.observe.alerts.record import Alert, AlertFile
from rlhpc.observe.alerts.rules import Engine, Rule

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


_log = logging.getLogger(__name__)


class RunAlerts:
    """``past``: records of the steps before this attempt. A failure is reported once, and the run continues."""

    def __init__(self, folder: RunFolder, config: RunConfig, stop: StopRequest, past: Iterable[Record] = ()) -> None:
        self._stop, self._guard = stop, ShownOnly("alerts")
        self._readings: Readings | None = None
        self._notifier = Notifier(folder, config.observe.alerts)
        with self._guard:
            rules = rules_of(config)
            self._engine = Engine(rules, (record for record in past if _time(record) is not None))
            self._file = AlertFile(folder)
            if rules:
                self._readings = Readings(folder)

    def step(self, record: Record) -> None:
        """Checks the metrics of a step, given with ``phase`` and ``step``."""
        if self._guard.failed:
            return
        with self._guard:
            readings = self._readings.newest if self._readings is not None else {}
            checked = {"time": time.time(), **readings, **record}
            for rule, message in self._engine.add(checked):
                self._fire(rule, message, checked)

    def close(self) -> None:
        """Ends the threads; waits for alerts that were not sent yet, within their time limit."""
        if self._readings is not None:
            self._readings.close()
        with self._guard:
            self._notifier.close()

    def _fire(self, rule: Rule, message: str, record: Record) -> None:
        """Records and sends an alert, unless this step was taken before by an earlier attempt and fired it; saves or
        stops in any case."""
        phase, step = record["phase"], record["step"]
        known = self._file.known
        if not any((one.rule, one.phase) == (rule.name, phase) and one.step >= step for one in known):
            alert = Alert(record["time"], phase, step, rule.name, rule.severity, message, rule.action)
            self._file.add(alert)
            _log.warning(f"alert {rule.name} at {phase} step {step}: {message}")
            self._notifier.send(alert)
        if rule.action == "save":
            self._stop.saves = True
        elif rule.action == "stop":
            self._stop.ask("alert")


def _time(record: Record) -> float | None:
    return number(record.get("time"))
