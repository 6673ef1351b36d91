"""A job that was submitted with plain sbatch: ``python -m rlhpc.launch.runs.direct CONFIG.yaml [KEY.SUB=VALUE]...``.

It does inside the job what `rlhpc submit` does on the login node, once, and is the batch step from there on.
"""

from __future__ import annotations

import argparse
import os
import stat
import sys
from collections.abc import Sequence
from pathlib import Path

from rlhpc.config.load import absolute_paths, dump_config, load_config
from rlhpc.config.schema import RunConfig
from rlhpc.core import env
from rlhpc.core.errors import EXIT_USER_ERROR, UserError
from rlhpc.core.files import remove, write_atomic
from rlhpc.core.folder import RunFolder
from rlhpc.core.shown import show
from rlhpc.core.storage import exists
from rlhpc.launch.run_lock import locked
from rlhpc.launch.runs.job_shape import JobShape, overrides_from_job
from rlhpc.launch.runs.prepare import run_prepare
from rlhpc.launch.runs.run_registry import enter, new_record, read_run
from rlhpc.launch.runs.submit import check_free
from rlhpc.launch.slurm.executor import check_folder_name
from rlhpc.launch.slurm.gpu_binding import check_job_binding
from rlhpc.launch.supervise.batch_job import job_name
from rlhpc.launch.supervise.supervisor import run_job
from rlhpc.plan.checks.run import check_config


def prepare_folder(config_file: Path, overrides: Sequence[str]) -> RunFolder:
    """Check the config and make its run folder; a requeued job finds the one it made.

    What the config leaves open is as the job is: nodes, ranks and GPUs on each, cores of a rank. A folder that holds
    another job's run is continued when CONFIG is that run's own config.yaml. Raises UserError.
    """
    config = load_config(config_file, overrides)
    run = RunFolder(config.folder)
    record = read_run(run.path).job
    if record is not None and record.job_id == job_name() and exists(run.config):
        return run
    taken = overrides_from_job(config, JobShape.from_environ())
    if taken:
        show(f"rlhpc: as the job is: {' '.join(taken)}")
    config = absolute_paths(load_config(config_file, [*overrides, *taken]))
    check_job_binding(config, os.environ)
    check_folder_name(run.path)
    resume = config_file.absolute() == run.config
    check_free(run, resume)
    check_config(config, prepared=config.prepare is None)
    if config.prepare is not None:
        if not run_prepare(config.prepare):
            raise UserError(f"{config.prepare.function} failed, see above", where="prepare.function")
        check_config(config)
    _claim(run, config, resume)
    return run


def _claim(run: RunFolder, config: RunConfig, resume: bool) -> None:
    """Make the folder this job's, unless another one was first: elements of an array may begin together."""
    run.create()
    with locked(run, wait=True):
        check_free(run, resume)
        write_atomic(run.config, dump_config(config))
        remove(run.stop_requested)
        cluster = os.environ.get(env.SLURM_CLUSTER_NAME, "")
        enter(run, new_record(job_name(), config.name, Path.cwd(), _own_log(), cluster))


def _own_log() -> Path:
    """The file that sbatch's --output has named."""
    return Path(os.readlink("/proc/self/fd/1"))


def make_private(descriptor: int) -> None:
    """Close the job's log to others. Slurm has made it with the umask of whoever submitted; the run folder is private
    already."""
    status = os.fstat(descriptor)
    if stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid():
        os.fchmod(descriptor, 0o600)


def main() -> None:
    """Entry point for job scripts."""
    os.umask(0o077)
    for descriptor in (1, 2):
        make_private(descriptor)
    parser = argparse.ArgumentParser(prog="python -m rlhpc.launch.runs.direct", description="The batch step of a run.")
    parser.add_argument("config", type=Path, help="a YAML file")
    parser.add_argument("overrides", nargs="*", metavar="KEY.SUB=VALUE", help="changes a key of it")
    parser.add_argument("--entry", default="", help=argparse.SUPPRESS)  # the ranks' program
    given = parser.parse_intermixed_args()
    try:
        if not job_name():
            raise UserError("this is no Slurm job", where=env.SLURM_JOB_ID, remedy="start it with sbatch")
        run = prepare_folder(given.config, given.overrides)
    except UserError as error:
        show(f"rlhpc: {error}", file=sys.stderr)
        sys.exit(EXIT_USER_ERROR)
    run_job(str(run.path), given.entry)


if __name__ == "__main__":
    main()
