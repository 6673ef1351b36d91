"""Batch step of a plain sbatch script: ``python -m rlhpc.launch.runs.direct CONFIG.yaml [KEY.SUB=VALUE]...``.

Inside the job, it first does once what `rlhpc submit` does on the login node, then runs the supervisor.
"""

from __future__ import annotations

import argparse
import os
import stat
import sys
from collections.abc import Sequence
from pathlib import Path

from rlhpc.config.load import absolute_paths, load_config, load_with_site
from rlhpc.config.saved import save_config
from rlhpc.config.schema import RunConfig
from rlhpc.core import env
from rlhpc.core.errors import EXIT_USER_ERROR, UserError
from rlhpc.core.files import remove
from rlhpc.core.folder import RunFolder
from rlhpc.core.redaction import guard_output
from rlhpc.core.shown import show
from rlhpc.core.storage import exists
from rlhpc.launch.resolved import resolved
from rlhpc.launch.runs.job_shape import JobShape, overrides_from_job
from rlhpc.launch.runs.prepare import run_prepare
from rlhpc.launch.runs.run_registry import new_record, read_run, register
from rlhpc.launch.runs.submit import claimed
from rlhpc.launch.slurm.executor import check_folder_name
from rlhpc.launch.slurm.job_spec import check_job_binding
from rlhpc.launch.supervise.batch_job import job_name
from rlhpc.launch.supervise.supervisor import run_job
from rlhpc.plan.checks.run import check_config


def prepare_folder(config_file: Path, overrides: Sequence[str]) -> RunFolder:
    """Checks the config and makes its run folder; a requeued job finds the one it made.

    Keys that the config does not set are taken from the job: nodes, ranks and GPUs per node, cores per rank. These take
    precedence over a site file. Another job's run is resumed if CONFIG is that run's own config.yaml. Raises UserError.
    """
    loaded = load_with_site(config_file, overrides)
    config = loaded.config
    run = RunFolder(config.folder)
    record = read_run(run.path).job
    if record is not None and record.job_id == job_name() and exists(run.config):
        return run
    from_site = loaded.site.keys if loaded.site is not None else ()
    taken = overrides_from_job(config, JobShape.from_environ(), from_site)
    if taken:
        show(f"rlhpc: taken from the job: {' '.join(taken)}")
    config = absolute_paths(load_config(config_file, [*overrides, *taken]))
    check_job_binding(config, os.environ)
    check_folder_name(run.path)
    resume = config_file.absolute() == run.config
    with claimed(run, again=resume, wait=True):  # elements of an array may begin together
        _write(run, config)
    return run


def _write(run: RunFolder, config: RunConfig) -> None:
    """Checks the config, prepares its inputs, and makes the folder this job's."""
    check_config(config, prepared=config.prepare is None)
    if config.prepare is not None:
        if not run_prepare(config.prepare):
            raise UserError(f"{config.prepare.function} failed, see above", where="prepare.function")
        check_config(config)
    save_config(run, resolved(config, run))
    remove(run.stop_requested)
    cluster = os.environ.get(env.SLURM_CLUSTER_NAME, "")
    register(run, new_record(job_name(), config.name, Path.cwd(), _own_log(), cluster))


def _own_log() -> Path:
    """File of sbatch's --output."""
    return Path(os.readlink("/proc/self/fd/1"))


def make_private(descriptor: int) -> None:
    """Makes the job's log private. Slurm created it with the umask of the submitting shell."""
    status = os.fstat(descriptor)
    if stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid():
        os.fchmod(descriptor, 0o600)


def main() -> None:
    """Entry point for job scripts."""
    os.umask(0o077)
    guard_output()
    for descriptor in (1, 2):
        make_private(descriptor)
    parser = argparse.ArgumentParser(prog="python -m rlhpc.launch.runs.direct", description="The batch step of a run.")
    parser.add_argument("config", type=Path, help="a YAML file")
    parser.add_argument("overrides", nargs="*", metavar="KEY.SUB=VALUE", help="overrides a key of it")
    parser.add_argument("--entry", default="", help=argparse.SUPPRESS)  # the ranks' program
    given = parser.parse_intermixed_args()
    try:
        if not job_name():
            raise UserError("not in a Slurm job", where=env.SLURM_JOB_ID, remedy="start it with sbatch")
        run = prepare_folder(given.config, given.overrides)
    except UserError as error:
        show(f"rlhpc: {error}", file=sys.stderr)
        sys.exit(EXIT_USER_ERROR)
    run_job(str(run.path), given.entry)


if __name__ == "__main__":
    main()
