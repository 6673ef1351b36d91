"""alerts.jsonl: one line for each alert of a run, the newest ones."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from rlhpc.core.files import LineFile, write_atomic
from rlhpc.core.folder import RunFolder
from rlhpc.core.records import Record, number, read_records
from rlhpc.core.redaction import redact

KEPT = 1000  # lines of the file at least; twice as many at most
_LONGEST = 1000  # characters of a message


@dataclass(frozen=True)
class Alert:
    """An alert. ``phase`` and ``step``: where the run was, "" and -1 for events of the job before its first step;
    ``severity``: info, warning or error; ``action``: warn, save or stop."""

    time: float
    phase: str
    step: int
    rule: str
    severity: str
    message: str
    action: str = "warn"


def read_alerts(folder: RunFolder) -> list[Alert]:
    """The alerts of a run, oldest first."""
    return [alert for record in read_records(folder.alerts) if (alert := _alert(record)) is not None]


class AlertFile:
    """Appends to alerts.jsonl, which never has more than twice ``kept`` lines. The launcher writes while no ranks run,
    the first rank while they do."""

    def __init__(self, folder: RunFolder, kept: int = KEPT) -> None:
        self._folder, self._kept, self._known = folder, kept, read_alerts(folder)[-kept:]
        self._lines = 2 * kept  # the first addition looks how many there are
        self._file: LineFile | None = None

    @property
    def known(self) -> list[Alert]:
        """Alerts that were in the file, and those added."""
        return self._known

    def add(self, alert: Alert) -> None:
        """Appends an alert; on disk when it returns."""
        self._known.append(alert)
        if self._file is None or self._lines >= 2 * self._kept:
            self._known = self._known[-self._kept :]
            write_atomic(self._folder.alerts, "".join(map(line, self._known)))
            self._file, self._lines = LineFile(self._folder.alerts), len(self._known)
        else:
            self._file.append(line(alert))
            self._lines += 1


def line(alert: Alert) -> str:
    """The alert as a line of the file."""
    fields = {**asdict(alert), "message": redact(alert.message)[:_LONGEST]}
    return json.dumps(fields, ensure_ascii=False) + "\n"


def _alert(record: Record) -> Alert | None:
    """None for a line that is no alert."""
    time, step = number(record.get("time")), record.get("step")
    texts = [record.get(name) for name in ("phase", "rule", "severity", "message", "action")]
    if time is None or type(step) is not int or not all(isinstance(text, str) for text in texts):
        return None
    phase, rule, severity, message, action = (str(text) for text in texts)
    return Alert(time, phase, step, rule, severity, message, action)
