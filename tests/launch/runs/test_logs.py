"""Logs of ranks that no Slurm has started."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlhpc.cli.status import run_over
from rlhpc.core import attempts
from rlhpc.core.folder import RunFolder
from rlhpc.launch.run_lock import is_locked, locked
from rlhpc.launch.runs import follow
from rlhpc.launch.runs.logs import follow_log, log_files
from rlhpc.launch.runs.run_registry import RunEntry, new_record, read_run, register


def test_logs_of_a_run_on_this_machine(tmp_path: Path) -> None:
    """submitit's names, among its other files."""
    run = RunEntry(RunFolder(tmp_path / "run"), None)
    run.folder.create()
    folder = attempts.begin(
        run.folder, job_id="", restart_count=0, nodes=("here",), world_size=11, saved_step=-1, hang_timeout_seconds=60
    )
    for name in ("7_submitted.pkl", "7_0_result.pkl", "7_10_log.out", "7_2_log.out", "7_0_log.out"):
        (folder.logs / name).write_text(name)
    found = [(log.title, log.path.name) for log in log_files(run, all_ranks=True)]
    assert found == [(f"rank {n}, attempt 1", f"7_{n}_log.out") for n in (0, 2, 10)]


@pytest.mark.heavy
def test_a_run_on_this_machine_is_followed_until_its_launcher_is_gone(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run").create()
    assert not is_locked(folder)
    folder.config.write_text("name: run\n")
    start = attempts.begin(
        folder, job_id="", restart_count=0, nodes=("here",), world_size=1, saved_step=-1, hang_timeout_seconds=60
    )
    log = start.logs / "7_0_log.out"
    log.write_text("step 1\n")
    command = [sys.executable, "-m", "rlhpc.cli.main", "logs", str(folder.path), "--follow"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as follower:
        with locked(folder):
            assert is_locked(folder)
            assert follower.stdout is not None
            assert [follower.stdout.readline() for _ in range(2)] == [f"==> rank 0, attempt 1: {log} <==\n", "step 1\n"]
            for step in (2, 3):
                with open(log, "a") as file:
                    file.write(f"step {step}\n")
                assert follower.stdout.readline() == f"step {step}\n"
            assert follower.poll() is None
        assert follower.wait(100) == 0
    assert not is_locked(folder)


SQUEUE = """#!/bin/sh
cd "${0%/*}"
echo >> asked
if [ -e state ]; then echo "7|$(cat state)|None|N/A|N/A|1:00|node1"; exit 0; fi
echo "slurm_load_jobs error: Unable to contact slurm controller (connect failure)" >&2
exit 1
"""


@pytest.mark.heavy
def test_a_job_is_followed_while_the_controller_is_away(tmp_path: Path, monkeypatch, capsys) -> None:
    """Jobs continue without it: its log is shown until Slurm says that the job is over."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for name in ("SHORTEST_SECONDS", "LONGEST_SECONDS"):
        monkeypatch.setattr(follow, name, 0.2)
    monkeypatch.setattr(follow, "_FOLDER_SECONDS", 0.0)
    slurm, folder = tmp_path / "slurm", RunFolder(tmp_path / "run")
    slurm.mkdir()
    (slurm / "squeue").write_text(SQUEUE)
    (slurm / "squeue").chmod(0o700)
    monkeypatch.setenv("PATH", f"{slurm}:{os.environ['PATH']}")
    folder.create()
    folder.config.write_text("name: run\n")
    log = folder.path / "batch.log"
    log.write_text("step 1\n")
    register(folder, new_record("7", "run", tmp_path, log))
    over = run_over(read_run(folder.path))

    def ended() -> bool:
        if over():
            return True
        asked = len((slurm / "asked").read_text()) if (slurm / "asked").exists() else 0
        if asked >= 2 and log.read_text() == "step 1\n":
            log.write_text("step 1\nstep 2\n")  # while the controller is away
        elif asked >= 4:
            (slurm / "new").write_text("COMPLETED")
            (slurm / "new").rename(slurm / "state")
        return False

    assert "".join(follow_log(log, 0, ended)) == "step 1\nstep 2\n"
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("rlhpc: slurm: squeue failed: ")
