"""Logs of ranks that no Slurm has started."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from rlhpc.core import attempts
from rlhpc.core.folder import RunFolder
from rlhpc.launch.run_lock import is_locked, locked
from rlhpc.launch.runs.logs import log_files
from rlhpc.launch.runs.run_registry import RunEntry


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


def test_a_run_on_this_machine_is_followed_until_its_launcher_is_gone(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.create()
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
