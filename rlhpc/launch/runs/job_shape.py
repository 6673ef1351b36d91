"""Compares the job of a plain sbatch script with the configuration. Pure."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from rlhpc.config.ranks import ranks_are_set
from rlhpc.config.schema import RunConfig
from rlhpc.core import env
from rlhpc.core.errors import UserError

# Option of sbatch and key of the configuration.
_NODES = "--nodes", "slurm.nodes"
_RANKS = "--ntasks-per-node", "resources.ranks_per_node"
_CPUS = "--cpus-per-task", "slurm.cpus_per_rank"
_GPUS = "--gpus-per-node", "slurm.gpus_per_node"


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
                where=_RANKS[0],
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
        taken.append(f"{_NODES[1]}={job.nodes}")
    elif not slurm.least_nodes <= job.nodes <= slurm.most_nodes:
        wanted = "-".join(str(count) for count in dict.fromkeys([slurm.least_nodes, slurm.most_nodes]))
        raise _unlike(_NODES, wanted, job.nodes)
    ranks = resources.ranks_per_node
    if job.ranks_per_node is not None and not ranks_are_set(config):
        ranks = job.ranks_per_node
        taken.append(f"{_RANKS[1]}={ranks}")
    elif not ranks_are_set(config):
        gpus = (job.gpus_per_node, slurm.gpus_per_node)
        if _GPUS[1] not in from_site:
            gpus = gpus[::-1]
        ranks = max(1, next((count for count in gpus if count is not None), 1))
        taken += [f"{_RANKS[1]}={ranks}"] if ranks > 1 else []
    elif job.ranks_per_node not in (None, ranks):
        raise _unlike(_RANKS, ranks, job.ranks_per_node)
    for names, mine, given in (
        (_CPUS, slurm.cpus_per_rank, job.cpus_per_rank),
        (_GPUS, slurm.gpus_per_node, job.gpus_per_node),
    ):
        if given is not None and (mine is None or names[1] in from_site):
            taken.append(f"{names[1]}={given}")
        elif given is not None and mine is not None and mine > given:
            raise _unlike(names, mine, given)
    if job.gpus_per_node and job.gpus_per_node < ranks and slurm.gpus_per_node != 0:
        raise UserError(
            f"the job has {job.gpus_per_node} on each node for {ranks} ranks",
            where=_GPUS[0],
            remedy=f"submit with {_GPUS[0]}={ranks}, or with {_RANKS[0]}={job.gpus_per_node}",
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
    """4, h100:4, and h100:2,a100:2 are four."""
    return sum(int(number) for number in re.findall(r"(?:^|[:,])(\d+)(?=,|$)", text))
