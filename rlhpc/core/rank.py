"""Rank of this process, from the variables of any launcher."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, replace

from rlhpc.core import env
from rlhpc.core.errors import UserError

# (rank, world size, local rank) by launcher, in order of precedence.
_SOURCES = (
    (env.RANK, env.WORLD_SIZE, env.LOCAL_RANK),
    (env.SLURM_PROCID, env.RLHPC_WORLD_SIZE, env.SLURM_LOCALID),
    (env.SLURM_PROCID, env.SLURM_NTASKS, env.SLURM_LOCALID),
)


@dataclass(frozen=True)
class RankInfo:
    """Place of this process in its world, and in the job.

    A world is the ranks of a default process group. Without roles it is the whole job. With roles (``role``, such as
    ``trainers`` or ``engines``) each has a world of its own, a block of the job's ranks from ``first`` on: ``rank`` and
    ``world_size`` are the role's, ``job_rank`` and ``job_size`` the job's. Files, heartbeats, logs and GPUs go by the
    job's ranks.
    """

    rank: int
    world_size: int
    local_rank: int  # on its node, of all roles
    node: str
    master_addr: str
    master_port: int
    restart_count: int = 0
    role: str = ""
    first: int = 0  # the job's rank of the world's rank 0
    job_size: int = 0  # default: world_size
    generation: int = 0  # how often it was started before in this attempt

    def __post_init__(self) -> None:
        if not self.job_size:
            object.__setattr__(self, "job_size", self.world_size)

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] = os.environ) -> RankInfo:
        """Rank by RANK/WORLD_SIZE/LOCAL_RANK, else Slurm's variables; a single rank if none is set."""
        rank, world_size, local_rank = "0", "1", "0"
        for rank_name, world_name, local_name in _SOURCES:
            if rank_name in environ and world_name in environ:
                rank, world_size = environ[rank_name], environ[world_name]
                local_rank = environ.get(local_name, "0")
                break
        exported = env.RANK in environ and env.WORLD_SIZE in environ
        apart = not exported and env.RLHPC_FIRST_RANK in environ
        if apart:
            world_size = environ[env.RLHPC_WORLD_SIZE]
        role, first, job_size = _role(environ.get(env.RLHPC_ROLE, "") if exported else "")
        info = cls(
            rank=int(rank) + (int(environ[env.RLHPC_FIRST_RANK]) if apart else 0),
            world_size=int(world_size),
            local_rank=int(local_rank) + (int(environ.get(env.RLHPC_FIRST_LOCAL_RANK, "0")) if apart else 0),
            node=node_name(environ),
            master_addr=environ.get(env.MASTER_ADDR, "127.0.0.1"),
            master_port=int(environ.get(env.MASTER_PORT, "0")),
            restart_count=int(environ.get(env.SLURM_RESTART_COUNT, "0")),
            role=role,
            first=first,
            job_size=job_size,
            generation=int(environ.get(env.RLHPC_GENERATION, "0")),
        )
        if info.job_size > 1 and not info.master_port and not environ.get(env.RLHPC_STORE):
            raise UserError(
                f"rank {info.job_rank} of {info.job_size} has no rendezvous",
                where=env.MASTER_PORT,
                remedy=f"start the ranks with rlhpc, or set {env.MASTER_ADDR} and {env.MASTER_PORT}",
            )
        return info

    def in_role(self, name: str, first: int, size: int) -> RankInfo:
        """This rank, of a job without roles so far, in a role of ``size`` of the job's ranks from ``first`` on."""
        assert not self.role, f"rank {self.job_rank} is in role {self.role}"
        assert name, "a role has a name"
        assert 0 <= first <= self.rank < first + size <= self.world_size, f"rank {self.rank} is not in role {name}"
        return replace(self, rank=self.rank - first, world_size=size, role=name, first=first, job_size=self.world_size)

    def export(self, environ: MutableMapping[str, str] = os.environ) -> None:
        """Sets the variables from which ``from_environ`` reads this rank, and libraries their rank."""
        environ[env.RANK], environ[env.WORLD_SIZE] = str(self.rank), str(self.world_size)
        environ[env.LOCAL_RANK] = str(self.local_rank)
        if self.role:
            environ[env.RLHPC_ROLE] = f"{self.role} {self.first} {self.job_size}"
        else:
            environ.pop(env.RLHPC_ROLE, None)

    @property
    def job_rank(self) -> int:
        """Number of this rank in the job."""
        return self.first + self.rank

    @property
    def place(self) -> str:
        """Name of the node, unique even if several nodes (containers, say) share a host name."""
        return f"{self.node}-{self.job_rank - self.local_rank}"


def node_name(environ: Mapping[str, str] = os.environ) -> str:
    """Slurm's name of this node, which its commands take and which may differ from the host name; outside of a job the
    host name."""
    return environ.get(env.SLURMD_NODENAME) or socket.gethostname()


def _role(text: str) -> tuple[str, int, int]:
    """Role, its first rank and the job's size, from a variable that ``export`` has set."""
    if not text:
        return "", 0, 0
    name, first, job_size = text.split()
    return name, int(first), int(job_size)
