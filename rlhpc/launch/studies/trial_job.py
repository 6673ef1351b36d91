"""Batch step of a trial's job: the run, Optuna's pruner at each new value of the objective, and the study's advance at
the end."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from rlhpc.config.study import NO_PRUNER
from rlhpc.core.folder import RunFolder
from rlhpc.core.records import MetricsFile, Record
from rlhpc.core.shown import show
from rlhpc.launch.studies.advance import Advance
from rlhpc.launch.studies.sides import curve
from rlhpc.launch.studies.study_folder import StudyFolder, read_study
from rlhpc.launch.studies.trial_runs import SlurmTrials
from rlhpc.launch.supervise.supervisor import run_job

_ADVANCE_SECONDS = 300.0
_POLL_SECONDS = 5.0


def run_trial(run_dir: str) -> int:
    """Runs the trial's job; returns its exit code."""
    run, over = RunFolder(Path(run_dir)), threading.Event()
    folder, trials = StudyFolder(run.path.parents[1]), SlurmTrials(Path.cwd())

    def end() -> None:
        advance_study(folder)  # first: Slurm leaves a cancelled job little time
        trials.cancel(run)

    threading.Thread(target=prune, args=(folder, run, end, over), daemon=True).start()
    try:
        return run_job(run_dir)
    finally:
        over.set()
        advance_study(folder)


def prune(
    folder: StudyFolder,
    run: RunFolder,
    end: Callable[[], object],
    over: threading.Event,
    poll_seconds: float = _POLL_SECONDS,
) -> None:
    """Asks the study's pruner at each new value of the objective, until the run is ``over``. ``end``: ends the job of a
    trial that it rejects."""
    follower, new = MetricsFile(run.metrics).follow(), list[Record]()
    while not over.wait(poll_seconds):
        try:
            new += follower.read()[0]
            if not new:
                continue
            study = read_study(folder)
            if study.pruner.name == NO_PRUNER:
                return
            if curve(new, study.objective.metric):
                with folder.locked():
                    pruned = Advance(folder, SlurmTrials(Path.cwd())).prune(int(run.path.name.rpartition("-")[2]))
                if pruned:
                    end()
                    return
            new.clear()
        except Exception as error:  # of the file system, Optuna or Slurm: asks again at the next poll
            show(f"rlhpc: the pruner is not asked: {error}", file=sys.stderr)


def advance_study(folder: StudyFolder) -> None:
    """Advances the study in a process of its own, whose failure is not the trial's: another trial's end, or the user,
    advances it later."""
    command = [sys.executable, "-m", "rlhpc.cli.main", "study", "advance", str(folder.path)]
    try:
        code = subprocess.run(command, timeout=_ADVANCE_SECONDS, check=False).returncode
    except (OSError, subprocess.TimeoutExpired) as error:
        show(f"rlhpc: the study is not advanced: {error}", file=sys.stderr)
        return
    if code:
        show(f"rlhpc: the study is not advanced; do it with: rlhpc study advance {folder.path}", file=sys.stderr)
