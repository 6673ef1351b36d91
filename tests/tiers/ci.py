"""Runs one slice of the long tests: ``python -m tests.tiers.ci --started TIME``.

CI is a clean clone without state, so the slice is a function of the commit: the number of commits modulo the number of
slices; in a shallow clone, where commits cannot be counted, the hash instead. As many consecutive commits as there are
slices run all tests. No test starts later than 55 minutes after TIME (seconds since 1970); the run ends by minute 75.
"""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
import time
from pathlib import Path

from tests.tiers.durations import read_table
from tests.tiers.imports import ROOT

SLICE_SECONDS = 1200.0
_START_UNTIL, _END = 55 * 60.0, 74 * 60.0


def slice_count(seconds: float) -> int:
    """Number of slices of the long tests."""
    return max(1, math.ceil(seconds / SLICE_SECONDS))


def slice_of_commit(count: int, root: Path = ROOT) -> int:
    """Slice of the current commit, from 1."""
    shallow = _git(root, "rev-parse", "--is-shallow-repository") == "true"
    number = int(_git(root, "rev-parse", "HEAD"), 16) if shallow else int(_git(root, "rev-list", "--count", "HEAD"))
    return number % count + 1


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.tiers.ci", description=__doc__)
    parser.add_argument("--started", type=float, default=time.time(), help="start of CI, in seconds since 1970")
    started = parser.parse_args().started
    count = slice_count(sum(row.seconds for row in read_table() if row.tier == "long"))
    selected = slice_of_commit(count)
    print(
        f"slice {selected} of {count} of the long tests, {(time.time() - started) / 60:.0f} minutes after the start",
        flush=True,
    )
    command = [sys.executable, "-m", "pytest", "-v", "--no-header", "--tiers=long", f"--slice={selected}/{count}"]
    command.append(f"--start-until={started + _START_UNTIL}")
    try:
        code = subprocess.run(command, cwd=ROOT, check=False, timeout=max(1.0, started + _END - time.time())).returncode
    except subprocess.TimeoutExpired:
        print(f"ended at minute {_END / 60:.0f}: the slice is not finished", file=sys.stderr)
        return 1
    return 0 if code == 5 else code  # 5: the slice is empty


if __name__ == "__main__":
    sys.exit(main())
