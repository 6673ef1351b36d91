"""Small programs for the batch step, in the place of the launcher that starts ranks: called with the run folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from rlhpc.core import attempts
from rlhpc.core.attempts import Verdict
from rlhpc.core.folder import AttemptFolder, RunFolder
from rlhpc.launch.supervise.supervisor import run_job


def supervise(run_dir: str) -> int:
    """The real launcher; its ranks leave what they were given."""
    return run_job(run_dir, "tests.slurm.ranks:note")


def sleep(run_dir: str) -> int:
    time.sleep(600)
    return 0


def begin(run_dir: str, ranks: int = 2) -> AttemptFolder:
    """A start of the ranks, as it is recorded, with what each rank printed."""
    known = {
        "job_id": os.environ["SLURM_JOB_ID"],
        "restart_count": int(os.environ.get("SLURM_RESTART_COUNT", "0")),
        "nodes": (os.environ["SLURMD_NODENAME"],),
        "world_size": ranks,
        "saved_step": -1,
    }
    folder = attempts.begin(RunFolder(Path(run_dir)), **known)
    for rank in range(ranks):
        (folder.logs / f"rank-{rank:05d}.log").write_text(f"rank {rank} of start {folder.number}\n")
    return folder


def step(run_dir: str, number: int, total: int = 3) -> None:
    record = {"phase": "rl", "step": number, "total_steps": total, "time": time.time(), "reward/mean": number / 10}
    with open(Path(run_dir, "metrics.jsonl"), "a") as file:
        file.write(json.dumps({**record, "perf/tokens_per_second": 1000.0}) + "\n")


def succeed(run_dir: str) -> int:
    """Three steps and a report."""
    folder = begin(run_dir)
    for number in (1, 2, 3):
        step(run_dir, number)
        time.sleep(0.5)
    report = folder.run.report_text
    report.parent.mkdir(exist_ok=True)
    report.write_text("the report\n")
    attempts.end(folder, Verdict(time.time(), "finished", "", "none"))
    return 0


def fail(run_dir: str) -> int:
    """One step, then rank 1 is to blame."""
    folder = begin(run_dir)
    step(run_dir, 1)
    attempts.end(folder, Verdict(time.time(), "user", "rollout.tp: 8 is too many", "stop", 1, "node1"))
    return 2


def work(run_dir: str) -> int:
    """A step of Slurm that a signal ends; it says which."""
    begin(run_dir)
    step(run_dir, 1)
    code = (
        "import signal, sys, time\n"
        "def end(number, frame): open(sys.argv[1], 'w').write(signal.Signals(number).name); sys.exit()\n"
        "for name in (signal.SIGUSR2, signal.SIGTERM): signal.signal(name, end)\n"
        "open(sys.argv[2], 'w').close(); time.sleep(600)\n"
    )
    files = [str(Path(run_dir, name)) for name in ("signalled", "working")]
    subprocess.run(["srun", "--ntasks=1", sys.executable, "-c", code, *files], check=False)
    return 0
