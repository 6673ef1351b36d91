"""Commands and webhooks of alerts: what they get, and that nobody waits for them."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rlhpc.config.observe import AlertsSection
from rlhpc.core.folder import RunFolder
from rlhpc.observe.alerts.notify import Notifier
from rlhpc.observe.alerts.record import Alert

ALERT = Alert(1.0, "rl", 7, "kl", "warning", "it's $(high) `now`")


def until(condition: Callable[[], bool], seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def alive(pid: int) -> bool:
    """Whether the process runs; a zombie, which nobody may reap, does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def test_a_command_gets_the_alert_as_text_alone(tmp_path: Path) -> None:
    section = AlertsSection(command=f'echo "$RLHPC_ALERT_MESSAGE" > {tmp_path}/shown; cat > {tmp_path}/json')
    notifier = Notifier(RunFolder(tmp_path), section)
    notifier.send(ALERT)
    notifier.close()
    assert (tmp_path / "shown").read_text() == "it's $(high) `now`\n"
    assert '"step": 7' in (tmp_path / "json").read_text()


@pytest.mark.heavy
def test_a_command_that_hangs_delays_nobody_and_is_killed_with_its_children(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = f"sleep 1000 & echo $! > {tmp_path}/child; echo $$ > {tmp_path}/shell; wait"
    notifier = Notifier(RunFolder(tmp_path), AlertsSection(command=command), 0.5)
    began = time.monotonic()
    for _ in range(100):
        notifier.send(ALERT)
    assert time.monotonic() - began < 0.4
    files = [tmp_path / "child", tmp_path / "shell"]
    assert until(lambda: all(file.exists() and file.read_text().strip() for file in files))
    pids = [int(file.read_text()) for file in files]
    assert os.getpgid(pids[0]) != os.getpgid(0)
    assert until(lambda: not any(map(alive, pids)))
    began = time.monotonic()
    notifier.close()
    assert time.monotonic() - began < 5.0
    assert capsys.readouterr().err == (
        "rlhpc: warning: continuing without the alerts' command, which failed: "
        "TimeoutError: it took longer than 0.5 s and was ended\n"
    )


def test_signals_reach_what_a_command_starts(tmp_path: Path) -> None:
    """Ranks block SIGTERM, and children inherit that: `kill` would end nothing."""
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGUSR2})
    try:
        section = AlertsSection(command=f"sleep 15 & kill $!; wait $!; echo $? > {tmp_path}/code")
        notifier = Notifier(RunFolder(tmp_path), section)
        notifier.send(ALERT)
        notifier.close()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    assert (tmp_path / "code").read_text() == "143\n"


@pytest.mark.parametrize("command", ["exit 3", "echo token=abc123def456 >&2; exit 3"])
def test_a_failing_command_is_reported_once(tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str) -> None:
    notifier = Notifier(RunFolder(tmp_path), AlertsSection(command=command))
    for _ in range(3):
        notifier.send(ALERT)
    notifier.close()
    (line,) = capsys.readouterr().err.splitlines()
    assert "exit code 3" in line
    assert "abc123def456" not in line


def test_a_server_that_does_not_answer_delays_nobody(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown: list[str] = []

    def reported() -> bool:
        shown.append(capsys.readouterr().err)
        return "continuing without the alerts' webhook" in "".join(shown)

    with socket.create_server(("127.0.0.1", 0)) as server:  # accepts, and says nothing
        url = f"http://127.0.0.1:{server.getsockname()[1]}/services/T0secretpart"
        notifier = Notifier(RunFolder(tmp_path), AlertsSection(webhook=url), 0.3)
        began = time.monotonic()
        notifier.send(ALERT)
        notifier.close()
        assert time.monotonic() - began < 5.0
        assert until(reported)
    assert "T0secretpart" not in "".join(shown)
