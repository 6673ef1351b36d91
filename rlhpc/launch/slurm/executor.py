"""Submits jobs to Slurm through submitit, and renders the script that it will use."""

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
from rlhpc.core.exits import without_secrets
from rlhpc.core.files import write_atomic
from rlhpc.core.imports import import_attribute
from rlhpc.core.redaction import guard_output
from rlhpc.launch.slurm.commands import clean_submission
from rlhpc.launch.slurm.errors import submission_error
from rlhpc.launch.slurm.job_spec import SECRETS, JobSpec

JOB = "rlhpc.launch.supervise.supervisor:run_job"
# Options that submitit spells differently.
_SUBMITIT_NAMES = {"job-name": "job_name"}


@dataclass(frozen=True)
class SubmittedJob:
    """One submitted job: its id (array elements as 7_3) and the log of its batch step."""

    job_id: str
    log: Path


def call_job(entry: str, run_dir: str) -> None:
    """Function that submitit calls in the batch step: calls ``entry`` with the run folder and exits with its code."""
    guard_output()
    try:
        code = import_attribute(entry, "job")(run_dir)
    except Exception as error:
        known = without_secrets(error)
        if known is error:
            raise
        raise known from None
    if code:
        raise SystemExit(code)


def script(spec: JobSpec, folder: Path, jobs: int = 1) -> str:
    """Text of the script for one job or an array of ``jobs``, with submitit's files in ``folder``."""
    from submitit.slurm.slurm import _make_sbatch_string

    command = f"{spec.python} -u -m submitit.core._submit {shlex.quote(str(folder))}"
    count = jobs if jobs > 1 else None
    return str(_make_sbatch_string(command=command, folder=folder, map_count=count, **_parameters(spec)))


def submit_jobs(
    spec: JobSpec, folder: Path, run_dirs: Sequence[Path], slurm: SlurmSection, entry: str = JOB
) -> list[SubmittedJob]:
    """Submits one job for each run folder, as an array if there are several. Raises UserError if Slurm refuses."""
    from submitit.core.utils import FailedJobError, FailedSubmissionError
    from submitit.slurm.slurm import SlurmExecutor

    with clean_submission(frozenset(name for name, _ in spec.options)):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_secrets(spec, folder)
        executor = SlurmExecutor(folder=folder, python=spec.python)
        executor.update_parameters(**_parameters(spec))
        printed = io.StringIO()
        try:
            with contextlib.redirect_stderr(printed):  # submitit prints what it raises
                jobs = _submit(executor, entry, run_dirs)
        except (FailedJobError, FailedSubmissionError) as error:
            raise submission_error(str(error) or printed.getvalue(), slurm) from None
    return [SubmittedJob(str(job.job_id), Path(job.paths.stdout)) for job in jobs]


def write_secrets(spec: JobSpec, folder: Path) -> None:
    """Writes the file in ``folder`` that the script reads its secrets from, if there are any."""
    if spec.secrets:
        write_atomic(folder / SECRETS, "\n".join([*spec.secrets, ""]), private=True)


def check_folder_name(folder: Path) -> None:
    """Raises UserError for characters that Slurm replaces in names of log files, such as %j."""
    if "%" in str(folder) or "\\" in str(folder) or "\n" in str(folder):
        raise UserError(f"{str(folder)!r} contains a % or a backslash", where="run_dir", remedy="choose another folder")


def _submit(executor: Any, entry: str, run_dirs: Sequence[Path]) -> list[Any]:
    if len(run_dirs) == 1:
        return [executor.submit(call_job, entry, str(run_dirs[0]))]
    jobs = []
    with executor.batch():
        for run_dir in run_dirs:
            jobs.append(executor.submit(call_job, entry, str(run_dir)))
    return jobs


def _parameters(spec: JobSpec) -> dict[str, Any]:
    """Parameters of submitit's executor. Its own wckey, signal and time are replaced. Nodes and tasks go to sbatch
    only: ranks are not submitit's tasks, srun starts them inside the job."""
    return {
        "use_srun": False,
        "stderr_to_stdout": True,
        "wckey": None,
        "setup": list(spec.setup),
        "time": None,
        "array_parallelism": 256,
        "additional_parameters": {_SUBMITIT_NAMES.get(name, name): value for name, value in spec.options},
    }
