"""Alerts on events of the job, which the launcher reports: verdicts, retries, requeues, excluded nodes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rlhpc.config.observe import AlertsSection
from rlhpc.core.attempts import Verdict, read_attempt
from rlhpc.core.folder import AttemptFolder, RunFolder
from rlhpc.core.records import MetricsFile
from rlhpc.core.shown import ShownOnly
from rlhpc.observe.alerts.configured import selected_builtins
from rlhpc.observe.alerts.notify import Notifier
from rlhpc.observe.alerts.record import Alert, AlertFile, read_alerts
from rlhpc.observe.alerts.rules import Severity


class JobAlerts:
    """Records and sends what happens to a run's attempts. A failure is reported once, and the job continues."""

    def __init__(self, run: RunFolder, section: AlertsSection) -> None:
        self._run, self._section = run, section
        self._notifier = Notifier(run, section)
        self._guard = ShownOnly("alerts on the job")

    def report(self, folder: AttemptFolder, verdict: Verdict) -> None:
        """Reports the verdict on an attempt. Returns at once."""
        with self._guard:
            attempt = read_attempt(folder)
            excluded = attempt.excluded if attempt is not None else ()
            for name, severity, message in _events(folder.number, verdict, excluded):
                self._fire(name, severity, message, verdict.time)

    def report_restart(self, folder: AttemptFolder, verdict: Verdict) -> None:
        """Reports that trainers are started again within an attempt. Returns at once."""
        with self._guard:
            what = _ended(f"the trainers of attempt {folder.number}", verdict)
            self._fire("retry", "warning", f"{what}; started again while the engines wait", verdict.time)

    def close(self) -> None:
        """Waits for alerts that were not sent yet, within their time limit."""
        with self._guard:
            self._notifier.close()

    def _fire(self, name: str, severity: Severity, message: str, time: float) -> None:
        if name in selected_builtins(self._section):
            phase, step = MetricsFile(self._run.metrics).last_step() or ("", -1)
            alert = Alert(time, phase, step, name, severity, message)
            AlertFile(self._run).add(alert)
            self._notifier.send(alert)


def stopping_alert(run: RunFolder) -> str:
    """The newest alert that has stopped the run: its rule and message."""
    found = [alert for alert in read_alerts(run) if alert.action == "stop"]
    return f"alert {found[-1].rule}: {found[-1].message}" if found else "an alert"


def _events(attempt: int, verdict: Verdict, excluded: Sequence[str]) -> Iterator[tuple[str, Severity, str]]:
    """Name, severity and message of each event."""
    cause, what = verdict.cause.replace("_", " "), _ended(f"attempt {attempt}", verdict)
    if verdict.action == "retry":
        yield "retry", "warning", f"{what}; started again in the same job"
    elif verdict.action == "requeue":
        yield "requeue", "warning", f"{what}; the job is requeued"
    elif verdict.cause == "allocation_lost":
        yield "requeue", "warning", what
    else:
        ended = verdict.cause == "finished"
        yield "verdict", "info" if ended else "error", "the run has finished" if ended else what
    if nodes := [node for node in verdict.excluded if node not in excluded]:
        yield "excluded_node", "warning", f"{', '.join(nodes)} excluded from the next attempts: {cause}"


def _ended(who: str, verdict: Verdict) -> str:
    cause = verdict.cause.replace("_", " ")
    rank = f" (rank {verdict.rank} on {verdict.node})" if verdict.rank >= 0 else ""
    return f"{who} ended: {cause}{rank}" + (f": {verdict.message}" if verdict.message else "")
