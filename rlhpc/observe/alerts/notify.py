"""Runs a command or calls a URL for an alert, in a thread, so that no step waits for it."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import threading
import urllib.request
from collections.abc import Mapping
from dataclasses import asdict

from rlhpc.config.observe import AlertsSection
from rlhpc.core import env
from rlhpc.core.folder import RunFolder
from rlhpc.core.redaction import learn, redact
from rlhpc.core.shown import ShownOnly
from rlhpc.observe.alerts.record import Alert

_MOST_WAITING = 32  # alerts; more are only recorded
_SECONDS = 10.0  # time limit of a command or request
_SHOWN = 200  # characters of a failed command's output


class Notifier:
    """Sends alerts, one after the other. The first failure of each kind is reported, and does not end the run."""

    def __init__(self, folder: RunFolder, section: AlertsSection, timeout: float = _SECONDS) -> None:
        self._folder, self._section, self._timeout = folder, section, timeout
        self._alerts: queue.Queue[Alert | None] = queue.Queue(_MOST_WAITING)
        self._thread: threading.Thread | None = None
        self._running: subprocess.Popen[bytes] | None = None
        self._command_guard, self._webhook_guard = ShownOnly("the alerts' command"), ShownOnly("the alerts' webhook")

    def send(self, alert: Alert) -> None:
        """Runs the command and calls the URL soon. Returns at once."""
        if self._section.command is None and self._section.webhook is None:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="alerts", daemon=True)
            self._thread.start()
        with contextlib.suppress(queue.Full):
            self._alerts.put_nowait(alert)

    def close(self) -> None:
        """Waits for alerts that were not sent yet, until the time limit of one."""
        if self._thread is None:
            return
        with contextlib.suppress(queue.Full):
            self._alerts.put_nowait(None)
        self._thread.join(self._timeout)
        running = self._running
        if running is not None:
            _end(running)

    def _work(self) -> None:
        command, webhook = self._section.command, self._section.webhook
        while (alert := self._alerts.get()) is not None:
            if command is not None:
                with self._command_guard:
                    self._run(command, alert)
            if webhook is not None:
                with self._webhook_guard:
                    self._call(webhook, alert)

    def _run(self, command: str, alert: Alert) -> None:
        """Runs the command in a process group of its own, which ends with the time limit."""
        environment = {**os.environ, **self._variables(alert)}
        pipe = subprocess.PIPE
        # A child inherits which signals are blocked: its own `timeout` or `kill` could not end what it starts.
        blocked = signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM, signal.SIGUSR2))
        try:
            process = self._running = subprocess.Popen(
                ["/bin/sh", "-c", command],
                stdin=pipe,
                stdout=subprocess.DEVNULL,
                stderr=pipe,
                env=environment,
                start_new_session=True,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        try:
            _, errors = process.communicate(self._json(alert), self._timeout)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"it took longer than {self._timeout:g} s and was ended") from None
        finally:
            _end(process)
            self._running = None
        if process.returncode:
            words = errors.decode(errors="replace").strip()[-_SHOWN:]
            raise RuntimeError(f"exit code {process.returncode}: {redact(words)}")

    def _call(self, url: str, alert: Alert) -> None:
        """Posts the alert to the URL."""
        learn({"webhook": url})
        request = urllib.request.Request(
            url, self._json(alert), {"Content-Type": "application/json", "User-Agent": "rlhpc"}, method="POST"
        )
        with urllib.request.urlopen(request, timeout=self._timeout):
            pass

    def _json(self, alert: Alert) -> bytes:
        """The alert with the run's name and folder. ``text`` is what chat services show."""
        known = {**asdict(alert), "message": redact(alert.message)}
        name = self._folder.path.name
        text = f"{name}: {alert.severity}: {known['message']}"
        return json.dumps({"text": text, "run": name, "folder": str(self._folder.path), **known}).encode()

    def _variables(self, alert: Alert) -> Mapping[str, str]:
        return {
            env.RLHPC_ALERT_RUN: str(self._folder.path),
            env.RLHPC_ALERT_RULE: alert.rule,
            env.RLHPC_ALERT_SEVERITY: alert.severity,
            env.RLHPC_ALERT_MESSAGE: redact(alert.message),
            env.RLHPC_ALERT_PHASE: alert.phase,
            env.RLHPC_ALERT_STEP: str(alert.step),
        }


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kills what is left of the process group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
