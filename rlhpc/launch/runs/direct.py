"""Batch step of a plain sbatch script: ``python -m rlhpc.launch.runs.direct CONFIG.yaml [KEY.SUB=VALUE]...``.

It first takes the steps of `rlhpc submit` inside the job, and then runs the supervisor. The job's resources are
compared with the configuration.
"""

from __future__ import annotations

import argparse
import os
import re
import stat
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlhpc.config.load import absolute_paths, load_config, load_with_site
from rlhpc.config.saved import save_config
from rlhpc.config.schema import RunConfig, ranks_are_set
from rlhpc.core import env
from rlhpc.core.errors import EXIT_USER_ERROR, UserError
from rlhpc.core.files import remove
from rlhpc.core.folder import RunFolder
from rlhpc.core.redaction import guard_output
from rlhpc.core.shown import show
from rlhpc.core.storage import exists
from rlhpc.launch.resolved import resolved
from rlhpc.launch.runs.prepare import run_prepare
from rlhpc.launch.runs.run_registry import new_record, read_run, register
from rlhpc.launch.runs.submit import claimed
from rlhpc.launch.slurm.executor import check_folder_name
from rlhpc.launch.slurm.job_spec import check_job_binding
from rlhpc.launch.supervise.batch_job import job_name
from rlhpc.launch.supervise.supervisor import run_job
from rlhpc.plan.checks.run import check_config

# Option of sbatch and key of the configuration.
NODES = "--nodes", "slurm.nodes"
RANKS = "--ntasks-per-node", "resources.ranks_per_node"
CPUS = "--cpus-per-task", "slurm.cpus_per_rank"
GPUS = "--gpus-per-node", "slurm.gpus_per_node"


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
    log = Path(os.readlink("/proc/self/fd/1"))  # file of sbatch's --output
    register(run, new_record(job_name(), config.name, Path.cwd(), log, cluster))


def main() -> None:
    """Entry point for job scripts."""
    os.umask(0o077)
    guard_output()
    for descriptor in (1, 2):  # Slurm created the log with the umask of the submitting shell
        status = os.fstat(descriptor)
        if stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid():
            os.fchmod(descriptor, 0o600)
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


@dataclass(frozen=True)
class JobShape:
    """Resources requested from sbatch; None if not requested. For a heterogeneous job: the sum of its nodes, and the
    minimum over its groups of the rest; the number of ranks per node must be the same in all groups."""

    nodes: int
    ranks_per_node: int | None
    cpus_per_rank: int | None
    gpus_per_node: int | None

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] = os.environ) -> JobShape:
        """Shape from the variables of a batch step. Raises UserError for groups that differ in ranks per node."""
        groups = int(environ.get(env.SLURM_HET_SIZE, "1"))

        def values(name: str) -> list[int]:
            names = [name] if groups == 1 else [env.of_het_group(name, group) for group in range(groups)]
            return [_count(environ[name]) for name in names if environ.get(name)]

        def least(name: str) -> int | None:
            found = values(name)
            return min(found) if len(found) == groups else None

        ranks = values(env.SLURM_NTASKS_PER_NODE)
        if len(set(ranks)) > 1 or len(ranks) not in (0, groups):
            raise UserError(
                f"{' and '.join(map(str, ranks))} in this job's {groups} groups",
                where=RANKS[0],
                remedy="give every group the same number",
            )
        return cls(
            sum(values(env.SLURM_JOB_NUM_NODES)),
            least(env.SLURM_NTASKS_PER_NODE),
            least(env.SLURM_CPUS_PER_TASK),
            least(env.SLURM_GPUS_PER_NODE),
        )


def overrides_from_job(config: RunConfig, job: JobShape, from_site: Collection[str] = ()) -> list[str]:
    """Resources of the job that ``config`` does not set, as KEY=VALUE; keys ``from_site`` count as not set.

    Raises UserError if config and job contradict each other.
    """
    slurm, resources = config.slurm, config.resources
    taken = []
    if "nodes" not in slurm.model_fields_set:
        taken.append(f"{NODES[1]}={job.nodes}")
    elif not slurm.least_nodes <= job.nodes <= slurm.most_nodes:
        wanted = "-".join(str(count) for count in dict.fromkeys([slurm.least_nodes, slurm.most_nodes]))
        raise _unlike(NODES, wanted, job.nodes)
    ranks = resources.ranks_per_node
    if job.ranks_per_node is not None and not ranks_are_set(config):
        ranks = job.ranks_per_node
        taken.append(f"{RANKS[1]}={ranks}")
    elif not ranks_are_set(config):
        gpus = (job.gpus_per_node, slurm.gpus_per_node)
        if GPUS[1] not in from_site:
            gpus = gpus[::-1]
        ranks = max(1, next((count for count in gpus if count is not None), 1))
        taken += [f"{RANKS[1]}={ranks}"] if ranks > 1 else []
    elif job.ranks_per_node not in (None, ranks):
        raise _unlike(RANKS, ranks, job.ranks_per_node)
    for names, mine, given in (
        (CPUS, slurm.cpus_per_rank, job.cpus_per_rank),
        (GPUS, slurm.gpus_per_node, job.gpus_per_node),
    ):
        if given is not None and (mine is None or names[1] in from_site):
            taken.append(f"{names[1]}={given}")
        elif given is not None and mine is not None and mine > given:
            raise _unlike(names, mine, given)
    if job.gpus_per_node and job.gpus_per_node < ranks and slurm.gpus_per_node != 0:
        raise UserError(
            f"the job has {job.gpus_per_node} on each node for {ranks} ranks",
            where=GPUS[0],
            remedy=f"submit with {GPUS[0]}={ranks}, or with {RANKS[0]}={job.gpus_per_node}",
        )
    return taken


def _unlike(names: tuple[str, str], wanted: object, given: object) -> UserError:
    option, key = names
    return UserError(
        f"{wanted} in the configuration, but the job has {given}",
        where=key,
        remedy=f"submit with {option}={wanted}, or add {key}={given}",
    )


def _count(text: str) -> int:
    """Number in a count of Slurm: 4, h100:4, and h100:2,a100:2 are four."""
    return sum(int(number) for number in re.findall(r"(?:^|[:,])(\d+)(?=,|$)", text))


if __name__ == "__main__":
    main()
