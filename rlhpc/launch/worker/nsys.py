"""Starts the profiled ranks under Nsight Systems, with capture ranges that the rank opens and closes."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from rlhpc.config.observe import ProfileSection, parse_ranges
from rlhpc.core import env
from rlhpc.core.errors import UserError
from rlhpc.core.folder import AttemptFolder
from rlhpc.core.rank import RankInfo
from rlhpc.core.shown import show

# It records CUDA and NVTX in a range. Sampling of the CPU needs rights that jobs rarely have.
_OPTIONS = ("--trace=cuda,nvtx", "--sample=none", "--cpuctxsw=none")
_RANGES = ("--capture-range=cudaProfilerApi", "--capture-range-end=repeat")
# Slurm sends these to every process of a step; the rank below handles them, and nsys would end it.
_SIGNALS = (signal.SIGTERM, signal.SIGUSR2)


def nsys_environment(section: ProfileSection) -> dict[str, str]:
    """Variable that names the ranks to start under Nsight Systems; none without its tool."""
    if "nsys" not in section.tools:
        return {}
    return {env.RLHPC_NSYS: ",".join(map(str, section.ranks))}


def nsys_command(program: str, reports: Path, command: Sequence[str]) -> list[str]:
    """The command of a rank under Nsight Systems. ``reports``: path of its reports without their numbers and suffix."""
    return [program, "profile", *_OPTIONS, *_RANGES, f"--output={reports}", "--force-overwrite=true", *command]


def restart_under_nsys(attempt: AttemptFolder) -> None:
    """Replaces this process, if its rank is to be profiled and was not restarted, by Nsight Systems with the same
    command. Call first: nothing of this process is kept but its environment and output."""
    text = os.environ.pop(env.RLHPC_NSYS, "")
    if not text:
        return
    try:
        rank = RankInfo.from_environ().job_rank
    except UserError:
        return  # it is reported later
    if not any(rank in part for part in parse_ranges(text.split(","), env.RLHPC_NSYS)):
        return
    program = shutil.which("nsys")
    reports = attempt.nsys_reports(rank)
    try:
        if program is None:
            raise FileNotFoundError("nsys is not in PATH")
        reports.parent.mkdir(parents=True, exist_ok=True)
        command = nsys_command(program, reports, _own_command())
        sys.stdout.flush()
        sys.stderr.flush()
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        os.execv(program, command)
    except OSError as error:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        show(f"rlhpc: warning: rank {rank} continues without Nsight Systems: {error}", file=sys.stderr)


def _own_command() -> list[str]:
    """The command that started this process, `python -m MODULE`."""
    spec = sys.modules["__main__"].__spec__
    assert spec is not None
    return [sys.executable, "-u", "-m", spec.name, *sys.argv[1:]]
