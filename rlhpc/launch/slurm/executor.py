"""Handing jobs to Slurm through submitit, and the very script that it will use."""

from __future__ import annotations

import contextlib
import io
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhpc.config.jobs import SlurmSection
from rlhpc.core.errors import UserError
from rlhpc.core.imports import import_attribute
from rlhpc.launch.slurm.commands import clean_submission
from rlhpc.launch.slurm.errors import submission_error
from rlhpc.launch.slurm.job_spec import JobSpec

JOB = "rlhpc.launch.supervise.supervisor:run_job"
# How submitit spells these among its own parameters; the others go in as they are.
_SUBMITIT_NAMES = {"job-name": "job_name"}


@dataclass(frozen=True)
class Handed:
    """One job in the queue: its id (array elements as 7_3) and the file of what its batch step prints."""

    job_id: str
    log: Path


def call_job(entry: str, run_dir: str) -> None:
    """What submitit calls in the batch step: ``entry`` with the run folder. Its code is the job's exit code."""
    code = import_attribute(entry, "job")(run_dir)
    if code:
        raise SystemExit(code)


def script(spec: JobSpec, folder: Path, jobs: int = 1) -> str:
    """The text of the script, for one job or an array of ``jobs``; submitit's files are in ``folder``."""
    from submitit.slurm.slurm import _make_sbatch_string

    command = f"{spec.python} -u -m submitit.core._submit {shlex.quote(str(folder))}"
    count = jobs if jobs > 1 else None
    return str(_make_sbatch_string(command=command, folder=folder, map_count=count, **_parameters(spec)))


def hand_over(
    spec: JobSpec, folder: Path, run_dirs: Sequence[Path], slurm: SlurmSection, entry: str = JOB
) -> list[Handed]:
    """Submit one job for each run folder, as an array if there are several. What Slurm refuses is a UserError."""
    from submitit.core.utils import FailedJobError, FailedSubmissionError
    from submitit.slurm.slurm import SlurmExecutor

    with clean_submission(frozenset(name for name, _ in spec.options)):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        executor = SlurmExecutor(folder=folder, python=spec.python)
        executor.update_parameters(**_parameters(spec))
        told = io.StringIO()
        try:
            with contextlib.redirect_stderr(told):  # submitit prints what it raises
                jobs = _submit(executor, entry, run_dirs)
        except (FailedJobError, FailedSubmissionError) as error:
            raise submission_error(str(error) or told.getvalue(), slurm) from None
    return [Handed(str(job.job_id), Path(job.paths.stdout)) for job in jobs]


def check_folder_name(folder: Path) -> None:
    """Slurm replaces %j and the like in the names of log files."""
    if "%" in str(folder) or "\\" in str(folder) or "\n" in str(folder):
        raise UserError(
            f"{str(folder)!r} has a % or a backslash in it", where="run_dir", remedy="choose another folder"
        )


def _submit(executor: Any, entry: str, run_dirs: Sequence[Path]) -> list[Any]:
    if len(run_dirs) == 1:
        return [executor.submit(call_job, entry, str(run_dirs[0]))]
    jobs = []
    with executor.batch():
        for run_dir in run_dirs:
            jobs.append(executor.submit(call_job, entry, str(run_dir)))
    return jobs


def _parameters(spec: JobSpec) -> dict[str, Any]:
    """Of submitit's executor. Its own wckey, signal and time are replaced; nodes and tasks are told to sbatch only,
    because ranks are not submitit's tasks here: srun starts them inside the job."""
    return {
        "use_srun": False,
        "stderr_to_stdout": True,
        "wckey": None,
        "setup": list(spec.setup),
        "time": None,
        "array_parallelism": 256,
        "additional_parameters": {_SUBMITIT_NAMES.get(name, name): value for name, value in spec.options},
    }
