"""The alerts of a running run, on its first rank: checks each step, records what fires, and acts on it."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable

from rlhpc.config.schema import RunConfig
from rlhpc.core.context import StopRequest
from rlhpc.core.folder import RunFolder
from rlhpc.core.records import Record, is_step, number
from rlhpc.core.shown import ShownOnly
from rlhpc.observe.alerts.configured import rules_of
from rlhpc.observe.alerts.engine import Engine, Fired
from rlhpc.observe.alerts.notify import Notifier
from rlhpc.observe.alerts.readings import Readings
from rlhpc.observe.alerts.record import Alert, AlertFile

_log = logging.getLogger(__name__)


class RunAlerts:
    """``past``: records of the steps before this attempt. A failure is reported once, and the run continues."""

    def __init__(self, folder: RunFolder, config: RunConfig, stop: StopRequest, past: Iterable[Record] = ()) -> None:
        self._stop, self._guard = stop, ShownOnly("alerts")
        self._readings: Readings | None = None
        self._notifier = Notifier(folder, config.observe.alerts.timeout_seconds)
        with self._guard:
            rules = rules_of(config)
            self._engine = Engine(rules, (record for record in past if is_step(record) and _time(record) is not None))
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
            for fired in self._engine.add(checked):
                self._fire(fired, checked)

    def close(self) -> None:
        """Ends the threads; waits for alerts that were not sent yet, within their time limit."""
        if self._readings is not None:
            self._readings.close()
        with self._guard:
            self._notifier.close()

    def _fire(self, fired: Fired, record: Record) -> None:
        """Records and sends an alert, unless this step was taken before by an earlier attempt and fired it; saves or
        stops in any case."""
        rule, phase, step = fired.rule, record["phase"], record["step"]
        known = self._file.known
        if not any((one.rule, one.phase) == (rule.name, phase) and one.step >= step for one in known):
            alert = Alert(record["time"], phase, step, rule.name, rule.severity, fired.message, rule.action)
            self._file.add(alert)
            _log.warning(f"alert {rule.name} at {phase} step {step}: {fired.message}")
            self._notifier.send(alert, rule.command, rule.webhook)
        if rule.action == "save":
            self._stop.saves = True
        elif rule.action == "stop":
            self._stop.ask("alert")


def _time(record: Record) -> float | None:
    return number(record.get("time"))
