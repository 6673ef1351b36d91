"""The batch step of a trial: the run, and then an advance of its study, so that nothing waits on the login node."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from rlhpc.core.shown import show
from rlhpc.launch.supervise.supervisor import run_job

_ADVANCE_SECONDS = 300.0


def run_trial(run_dir: str) -> int:
    """Runs the trial's job; returns its exit code."""
    try:
        return run_job(run_dir)
    finally:
        _advance(Path(run_dir).parents[1])


def _advance(study: Path) -> None:
    """In a process of its own, whose failure is not the trial's: another trial's end, or the user, advances again."""
    command = [sys.executable, "-m", "rlhpc.cli.main", "study", "advance", str(study)]
    try:
        code = subprocess.run(command, timeout=_ADVANCE_SECONDS, check=False).returncode
    except (OSError, subprocess.TimeoutExpired) as error:
        show(f"rlhpc: the study is not advanced: {error}", file=sys.stderr)
        return
    if code:
        show(f"rlhpc: the study is not advanced; do it with: rlhpc study advance {study}", file=sys.stderr)
