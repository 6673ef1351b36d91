"""Logs of ranks that no Slurm has started."""

from __future__ import annotations

from pathlib import Path

from rlhpc.core import attempts
from rlhpc.core.folder import RunFolder
from rlhpc.launch.logs import log_files
from rlhpc.launch.registry import Run


def test_logs_of_a_run_on_this_machine(tmp_path: Path) -> None:
    """submitit's names, among its other files."""
    run = Run(RunFolder(tmp_path / "run"), None)
    run.folder.create()
    folder = attempts.begin(
        run.folder, job_id="", restart_count=0, nodes=("here",), world_size=11, saved_step=-1, silence_seconds=60
    )
    for name in ("7_submitted.pkl", "7_0_result.pkl", "7_10_log.out", "7_2_log.out", "7_0_log.out"):
        (folder.logs / name).write_text(name)
    found = [(log.title, log.path.name) for log in log_files(run, all_ranks=True)]
    assert found == [(f"rank {n}, start 1", f"7_{n}_log.out") for n in (0, 2, 10)]
