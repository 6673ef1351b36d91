"""alerts.jsonl, the readings beside the metrics, and events of the job."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from rlhpc.config.load import load_config
from rlhpc.core import attempts
from rlhpc.core.attempts import Verdict
from rlhpc.core.context import StopRequest
from rlhpc.core.folder import AttemptFolder, RunFolder
from rlhpc.launch.runs.run_registry import read_run
from rlhpc.launch.runs.status import as_json, run_status
from rlhpc.launch.runs.status_view import details, show
from rlhpc.observe.alerts import record
from rlhpc.observe.alerts.job import JobAlerts, stopping_alert
from rlhpc.observe.alerts.record import Alert, AlertFile, read_alerts
from rlhpc.observe.alerts.run import Readings, RunAlerts
from tests.helpers.waiting import until
from tests.observe.alerts.series import healthy

DEMO = Path(__file__).parents[3] / "configs" / "demo.yaml"
ALERT = Alert(1.0, "rl", 7, "kl", "warning", "kl is high")


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / "run").create()


def begin(folder: RunFolder, **changes: object) -> AttemptFolder:
    known = {"job_id": "", "restart_count": 0, "nodes": ("node7",), "world_size": 4, "saved_step": -1}
    return attempts.begin(folder, **{**known, **changes})


def high(steps: int, first: int = 1) -> list[dict]:
    """Steps with a KL above any limit."""
    return healthy(steps, first, kl=5.0)


def test_the_file_keeps_the_newest_alerts(folder: RunFolder) -> None:
    for part in range(5):
        file = AlertFile(folder, kept=10)  # of another attempt
        for number in range(15):
            file.add(replace(ALERT, step=15 * part + number))
            steps = [alert.step for alert in read_alerts(folder)]
            assert steps == list(range(steps[0], 15 * part + number + 1))
            assert min(10, 15 * part + number + 1) <= len(steps) <= 20


def test_lines_that_are_no_alerts_are_skipped(folder: RunFolder) -> None:
    text = record.line(ALERT)
    wrong = [{"time": "x"}, {**json.loads(text), "step": None}, {**json.loads(text), "message": 3}, [], "kl"]
    folder.alerts.write_text("".join(json.dumps(one) + "\n" for one in wrong) + text + '{"time": 1')
    assert read_alerts(folder) == [ALERT]
    AlertFile(folder).add(replace(ALERT, step=8))
    assert [alert.step for alert in read_alerts(folder)] == [7, 8]


def test_messages_have_no_secrets_and_are_bounded(folder: RunFolder) -> None:
    AlertFile(folder).add(replace(ALERT, message="https://me:hunter2secret@host/ " + "x" * 10**6))
    (alert,) = read_alerts(folder)
    assert "hunter2secret" not in alert.message
    assert len(alert.message) == 1000


def test_a_resumed_run_does_not_fire_again_for_steps_that_it_repeats(folder: RunFolder) -> None:
    """It fired in step 12, was killed after step 14, and goes on from step 10; the second time from step 13."""
    config, stop = load_config(DEMO), StopRequest()
    records = [*healthy(10), *high(10, 11), *healthy(10, 21), *high(10, 31)]
    first = RunAlerts(folder, config, stop)
    for one in records[:14]:
        first.step(one)
    first.close()
    assert [(alert.rule, alert.step) for alert in read_alerts(folder)] == [("kl", 12)]
    for done in (10, 13, 14):
        again = RunAlerts(folder, config, stop, records[:done])
        for one in records[done:20]:
            again.step(one)
        again.close()
        assert len(read_alerts(folder)) == 1
    last = RunAlerts(folder, config, stop, records[:18])
    for one in records[18:]:
        last.step(one)
    last.close()
    assert [(alert.rule, alert.step) for alert in read_alerts(folder)] == [("kl", 12), ("kl", 32)]


@pytest.mark.parametrize(("action", "reason", "saves"), [("warn", "none", False), ("save", "none", True)])
def test_actions_ask_the_loop(folder: RunFolder, action: str, reason: str, saves: bool) -> None:
    stop = StopRequest()
    rule = f"{{metric: kl, above: 1, action: {action}}}"
    alerts = RunAlerts(folder, load_config(DEMO, [f"observe.alerts.rules=[{rule}]"]), stop)
    for one in high(3):
        alerts.step(one)
    assert (stop.reason, stop.saves) == (reason, saves)


def test_a_repeated_step_saves_again_and_a_stop_takes_precedence_over_a_signal_to_save(folder: RunFolder) -> None:
    rules = (
        "{metric: kl, above: 1, steps: 3, action: stop, name: kl}",
        "{metric: response/truncated_fraction, above: 0.9, steps: 3, action: save, name: truncated}",
    )
    config = load_config(DEMO, [f"observe.alerts.rules=[{', '.join(rules)}]"])
    for _ in range(2):
        stop = StopRequest()
        stop.ask("asked")
        alerts = RunAlerts(folder, config, stop)
        for one in healthy(3, kl=5.0, response__truncated_fraction=1.0):
            alerts.step(one)
        assert (stop.reason, stop.saves) == ("alert", True)
    assert len(read_alerts(folder)) == 2
    assert stopping_alert(folder) == f"alert kl: {read_alerts(folder)[0].message}"


def test_a_failure_is_reported_once_and_the_run_continues(
    folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    folder.alerts.mkdir()
    alerts = RunAlerts(folder, load_config(DEMO), StopRequest())
    for one in [*high(10), *healthy(10, 11), *high(10, 21)]:
        alerts.step(one)
    alerts.close()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("rlhpc: warning: continuing without alerts, which failed: ")


def test_readings_are_of_the_disk_and_the_newest_checkpoint(folder: RunFolder) -> None:
    readings = Readings(folder)
    until(lambda: readings.newest)  # its thread has looked, and will not look at half a checkpoint
    assert readings.look()["checkpoint/gib"] == 0.0
    for step, size in ((5, 3 << 20), (10, 2 << 20)):
        part = folder.checkpoints / f"step-{step:08d}" / "actor"
        part.mkdir(parents=True)
        (part / "weights").write_bytes(bytes(size))
    taken = readings.look()
    assert taken["checkpoint/gib"] == pytest.approx(2 / 1024)
    disk = os.statvfs(folder.path)
    assert taken["disk/free_gib"] == pytest.approx(disk.f_bavail * disk.f_frsize / 2**30, rel=0.2)
    assert 0 <= taken["checkpoint/age_minutes"] < 5
    old = Readings(folder)
    old._began -= 7200
    assert old.look()["checkpoint/age_minutes"] < 5
    os.utime(folder.checkpoints / "step-00000010", (0, 0))
    old._checkpoint = -1
    assert old.look()["checkpoint/age_minutes"] == pytest.approx(120, abs=5)
    for one in (readings, old):
        one.close()


@pytest.mark.parametrize(
    ("verdict", "expected"),
    [
        (Verdict(5.0, "finished", "", "none"), [("verdict", "info", "the run has finished")]),
        (
            Verdict(5.0, "gpu_memory", "out of memory", "stop", 3, "node7"),
            [("verdict", "error", "attempt 2 ended: gpu memory (rank 3 on node7): out of memory")],
        ),
        (
            Verdict(5.0, "crash", "died", "retry", excluded=("a",)),
            [("retry", "warning", "attempt 2 ended: crash: died; started again in the same job")],
        ),
        (
            Verdict(5.0, "bad_node", "no GPU", "requeue", excluded=("a", "b")),
            [
                ("requeue", "warning", "attempt 2 ended: bad node: no GPU; the job is requeued"),
                ("excluded_node", "warning", "b excluded from the next attempts: bad node"),
            ],
        ),
        (
            Verdict(5.0, "allocation_lost", "Slurm has requeued the job", "none"),
            [("requeue", "warning", "attempt 2 ended: allocation lost: Slurm has requeued the job")],
        ),
    ],
)
def test_events_of_the_job(folder: RunFolder, verdict: Verdict, expected: list[tuple[str, str, str]]) -> None:
    folder.metrics.write_text('{"phase": "rl", "step": 41}\n{"phase": "rl", "step": 42}\n')
    jobs = JobAlerts(folder, load_config(DEMO).observe.alerts)
    begin(folder)
    jobs.report(begin(folder, excluded=("a",)), verdict)
    jobs.close()
    found = read_alerts(folder)
    assert [(alert.rule, alert.severity, alert.message) for alert in found] == expected
    assert {(alert.phase, alert.step, alert.time) for alert in found} == {("rl", 42, 5.0)}


def test_an_event_before_the_first_step_has_none(folder: RunFolder) -> None:
    JobAlerts(folder, load_config(DEMO).observe.alerts).report(
        begin(folder), Verdict(time.time(), "crash", "died", "retry")
    )
    assert [(alert.phase, alert.step) for alert in read_alerts(folder)] == [("", -1)]


def test_status_shows_the_newest_alerts(folder: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    file = AlertFile(folder)
    for step in range(20, 30):
        file.add(replace(ALERT, step=step, action="save", message=f"kl is {step}\x1b[2J"))
    status = run_status(read_run(folder.path), None)
    show(details(status))
    (first, *others) = [line for line in capsys.readouterr().out.splitlines() if "kl: kl is" in line]
    assert first.startswith("alerts ")
    assert "rl step 25, kl: kl is 25\N{REPLACEMENT CHARACTER}[2J -> save" in first
    assert len(others) == 4
    assert [alert["step"] for alert in as_json(status)["alerts"]] == list(range(25, 30))


def test_events_that_are_off_are_not_recorded(folder: RunFolder) -> None:
    section = load_config(DEMO, ["observe.alerts.builtin=[requeue]"]).observe.alerts
    JobAlerts(folder, section).report(begin(folder), Verdict(time.time(), "crash", "died", "retry"))
    assert read_alerts(folder) == []
