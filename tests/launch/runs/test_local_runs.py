"""Runs on this machine, as `rlhpc status` shows them."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import subprocess
import sys
import threading
from pathlib import Path

from rlhpc.core import attempts
from rlhpc.core.folder import AttemptFolder, RunFolder
from rlhpc.launch.run_lock import locked
from rlhpc.launch.runs.run_registry import find_run, local_runs, read_run
from rlhpc.launch.runs.status import run_status
from tests.launch.runs.test_status import KNOWN, begin, make_run, verdict


def make_local(path: Path, **step: object) -> AttemptFolder:
    """A run of `rlhpc run` with one attempt and, if given, a step."""
    folder = RunFolder(path).create()
    folder.config.write_text("name: local\n")
    if step:
        folder.metrics.write_text(json.dumps({"phase": "rl", "total_steps": 100, **step}) + "\n")
    return attempts.begin(folder, **{**KNOWN, "nodes": ("here",), "job_id": ""})


def test_runs_on_this_machine_are_shown_with_their_state(tmp_path, monkeypatch):
    """By their locks and verdicts; the lock ends with the launcher, however that ends."""
    monkeypatch.chdir(tmp_path)
    endings = {
        "killed": None,
        "finished": verdict("finished", "none"),
        "stopped": verdict("stopped", "stop"),
        "failed": verdict("crash", "stop"),
    }
    for state, ending in endings.items():
        attempt = make_local(tmp_path / "runs" / state)
        if ending is not None:
            attempts.end(attempt, ending)
    make_local(tmp_path / "runs" / "running", step=3)
    (tmp_path / "runs" / "inputs").mkdir()
    (tmp_path / "runs" / "file").touch()
    submitted = make_run(tmp_path / "runs" / "submitted")
    with locked(RunFolder(tmp_path / "runs" / "running")):
        found = [run_status(run, None) for run in local_runs()]
        assert {one.run.name: one.state for one in found} == {state: state for state in (*endings, "running")}
        assert submitted not in local_runs()
        done = subprocess.run(
            [sys.executable, "-m", "rlhpc.cli.main", "status", "running", "--json"], capture_output=True, text=True
        )
        (known,) = json.loads(done.stdout)
    assert (known["state"], known["step"], known["job_id"]) == ("running", 3, None)
    assert run_status(find_run("running"), None).state == "killed"


def test_looking_whether_a_run_is_locked_keeps_no_launcher_out(tmp_path):
    folder = make_local(tmp_path / "run").run
    with open(folder.lock, "w") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        timer = threading.Timer(0.02, file.close)
        timer.start()
        with locked(folder):
            timer.join()


def test_the_table_is_readable_on_80_columns(tmp_path, monkeypatch):
    """No word is broken, and each note is below the table."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))  # no Slurm
    step = {"step": 12345, "total_steps": 100000, "reward/mean": -0.123, "perf/tokens_per_second": 1234567.0}
    make_local(tmp_path / "runs" / "qwen2.5-7b-math", **step)
    attempts.end(make_local(tmp_path / "runs" / "second"), verdict("gpu_memory", "stop", rank=3, node="node2"))
    begin(read_run(tmp_path / "runs" / "second"), job_id="")
    master, slave = pty.openpty()
    environ = {**os.environ, "TERM": "dumb", "COLUMNS": "80", "PYTHONPATH": str(Path(__file__).parents[3])}
    subprocess.run([sys.executable, "-m", "rlhpc.cli.main", "status"], stdout=slave, env=environ, check=True)
    os.close(slave)
    header, *rows = os.read(master, 65536).decode().splitlines()
    os.close(master)
    assert header.split() == ["run", "job", "state", "step", "reward", "tokens/s"]
    table = {row.split()[0]: row.split()[1:] for row in rows[:2]}
    assert table["qwen2.5-7b-math"] == ["local", "killed", "12345/100000", "-0.123", "1,234,567"]
    assert table["second"] == ["local", "killed"]
    assert rows[2] == "second: 1 restart(s); out of GPU memory (rank 3 on node2): words -> stopped"
    assert max(map(len, (header, *rows))) <= 80
    assert len(rows) == 3, "a run that has only been killed needs no note"
