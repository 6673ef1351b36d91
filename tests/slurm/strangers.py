"""Runs on two nodes beside programs of another user that pose as every rank, compared with an undisturbed run.

``python -m tests.slurm.strangers [--runs N]`` prints a table. A run must end bit-equal, or within 60 s with the cause
``stranger`` and an address.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhpc.core import attempts
from rlhpc.core.folder import RunFolder
from tests.helpers import stranger
from tests.helpers.runs import ROOT
from tests.slurm.chaos import config, difference, submit
from tests.slurm.cluster import Cluster
from tests.slurm.settings import Settings

SHORT = {"resources__ranks_per_node": 2, "rollout__tp": 2, "sft__steps": 2, "train__steps": 2}
KEYS = {"checkpoint__every": 2, "validation__every": 2, "train__prompts_per_step": 16, **SHORT}
SRUN = "52000-54999"  # ports of srun, which is not ours: who holds connections to it open keeps it from ending
SETTINGS = Settings(nodes=2, extra_conf=f"SrunPortRange={SRUN}")
_ENDED = ("COMPLETED", "FAILED")
_MOST_SECONDS = 60.0  # from the ranks' start to the end of a run that strangers keep from starting


@dataclass(frozen=True)
class Outcome:
    """``wrong`` is empty when all is as it should be."""

    cause: str
    seconds: float
    connections: int
    met: int
    read: int
    wrong: str


@contextlib.contextmanager
def strangers(cluster: Cluster, file: Path) -> Iterator[list[subprocess.Popen[Any]]]:
    """One on each node."""
    command = [sys.executable, stranger.__file__, str(file), f"--skip={SRUN.replace('-', ',')}"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with contextlib.ExitStack() as stack:
        started = [
            stack.enter_context(cluster.popen(command, node=node, user="bob", cwd=ROOT, **pipes))
            for node in cluster.nodes
        ]
        for process in started:
            assert process.stdout is not None
            process.stdout.readline()
        try:
            yield started
        finally:
            for process in started:
                assert process.stdin is not None
                process.stdin.close()


def run_beside(cluster: Cluster, folder: Path, reference: Path) -> Outcome:
    """A run on two nodes, with a stranger on each from before its first moment."""
    file, run = folder / "ran", RunFolder(folder / "run")
    with strangers(cluster, file) as processes:
        job = submit(cluster, config(folder, 2, **KEYS))
        cluster.wait_state(job, _ENDED, timeout=900)
        for process in processes:
            process.stdin.close()
        reports = [json.loads(process.stdout.read()) for process in processes]
    attempt, verdict = attempts.read_attempt(run.attempt(1)), attempts.read_verdict(run.attempt(1))
    assert attempt is not None
    assert verdict is not None
    seconds = verdict.time - attempt.started
    logs = "".join(log.read_text(errors="replace") for log in sorted(run.path.glob("attempts/*/logs/*")))
    met = len(re.findall("that no rank of this job opened", logs))
    read = sum(report["read"] for report in reports)
    if verdict.cause == "stranger":
        wrong = "" if re.search(r"from [\d.]+:\d+", verdict.message) else f"no address: {verdict.message}"
        wrong = wrong or ("" if seconds < _MOST_SECONDS else f"ended after {seconds:.0f} s")
    else:
        failed = f"{verdict.cause}: {verdict.message}"
        wrong = difference(run.path, reference) if verdict.cause == "finished" else failed
    wrong = wrong or (f"{read} bytes were read" if read else "") or ("code ran" if file.exists() else "")
    return Outcome(verdict.cause, seconds, sum(report["connections"] for report in reports), met, read, wrong)


def undisturbed(cluster: Cluster, folder: Path) -> Path:
    job = submit(cluster, config(folder, 2, **KEYS))
    cluster.wait_state(job, "COMPLETED", timeout=900)
    return folder / "run"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=5)
    runs = parser.parse_args().runs
    print("| run on 2 nodes | cause | seconds | connections | reports of strangers | bytes read | wrong |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    wrong = False
    with Cluster.up(SETTINGS) as cluster, tempfile.TemporaryDirectory(prefix="strangers-") as name:
        began = time.monotonic()
        reference = undisturbed(cluster, Path(name, "alone"))
        print(f"| alone | finished | {time.monotonic() - began:.0f} | | | | |", flush=True)
        for number in range(1, runs + 1):
            found = run_beside(cluster, Path(name, str(number)), reference)
            wrong = wrong or bool(found.wrong)
            print(
                f"| {number} | {found.cause} | {found.seconds:.0f} | {found.connections:,} | {found.met} | {found.read}"
                f" | {found.wrong or 'no'} |",
                flush=True,
            )
    sys.exit(wrong)


if __name__ == "__main__":
    main()
