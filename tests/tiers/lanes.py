"""Runs a tier in two concurrent lanes: ``python -m tests.tiers.lanes NAME [ARGUMENT OF PYTEST …]``.

Tests of ranks keep the cores busy; those on a real Slurm mostly wait for its timers. So tests with ranks and all others
run concurrently. The second lane's output is shown after the first lane has ended.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.tiers.durations import TIERS
from tests.tiers.imports import ROOT

# Tests of each lane. The first lane's output is shown immediately.
LANES = {"ranks": "ranks", "others": "not ranks"}


def main(arguments: list[str]) -> int:
    """Exit code: 0 if both lanes passed, else that of the first that failed."""
    name, *rest = arguments
    tiers = {"test": "check,test", "test-all": ",".join(TIERS)}[name]
    began, codes = time.monotonic(), {}
    with tempfile.TemporaryFile() as output:
        processes = {
            lane: subprocess.Popen(_command(name, lane, tiers, selected, rest), cwd=ROOT, **streams)
            for (lane, selected), streams in zip(
                LANES.items(), ({}, {"stdout": output, "stderr": subprocess.STDOUT}), strict=True
            )
        }
        try:
            codes = {lane: process.wait() for lane, process in processes.items()}
        finally:
            for process in processes.values():
                if process.poll() is None:
                    process.terminate()
        output.seek(0)
        sys.stdout.write(output.read().decode(errors="replace"))
    print(f"{name}: {(time.monotonic() - began) / 60:.1f} minutes, " + ", ".join(f"{k} {v}" for k, v in codes.items()))
    return next((code for code in codes.values() if code not in (0, 5)), 0)


def _command(name: str, lane: str, tiers: str, selected: str, rest: list[str]) -> list[str]:
    durations = Path("build") / f"durations-{name}-{lane}.json"
    # With "=": before reading conftest.py, pytest would take a separate word for a test file.
    options = [f"--tiers={tiers}", "-m", selected, f"--write-durations={durations}"]
    return [sys.executable, "-m", "pytest", "-q", *options, *rest]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
