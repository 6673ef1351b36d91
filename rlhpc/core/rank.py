"""Rank of this process, from the variables of any launcher."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from rlhpc.core import env
from rlhpc.core.errors import UserError

# (rank, world size, local rank) by launcher, in order of precedence.
_SOURCES = (
    (env.RANK, env.WORLD_SIZE, env.LOCAL_RANK),
    (env.SUBMITIT_LOCAL_GLOBALID, env.SUBMITIT_LOCAL_NTASKS, env.SUBMITIT_LOCAL_LOCALID),
    (env.SLURM_PROCID, env.RLHPC_WORLD_SIZE, env.SLURM_LOCALID),
    (env.SLURM_PROCID, env.SLURM_NTASKS, env.SLURM_LOCALID),
)


@dataclass(frozen=True)
class RankInfo:
    rank: int
    world_size: int
    local_rank: int
    node: str
    master_addr: str
    master_port: int
    restart_count: int = 0

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] = os.environ) -> RankInfo:
        """Rank by RANK/WORLD_SIZE/LOCAL_RANK, else submitit's or Slurm's variables; a single rank if none is set."""
        rank, world_size, local_rank = "0", "1", "0"
        for rank_name, world_name, local_name in _SOURCES:
            if rank_name in environ and world_name in environ:
                rank, world_size = environ[rank_name], environ[world_name]
                local_rank = environ.get(local_name, "0")
                break
        info = cls(
            rank=int(rank),
            world_size=int(world_size),
            local_rank=int(local_rank),
            node=socket.gethostname(),
            master_addr=environ.get(env.MASTER_ADDR, "127.0.0.1"),
            master_port=int(environ.get(env.MASTER_PORT, "0")),
            restart_count=int(environ.get(env.SLURM_RESTART_COUNT, "0")),
        )
        if info.world_size > 1 and not info.master_port and not environ.get(env.RLHPC_STORE):
            raise UserError(
                f"rank {info.rank} of {info.world_size} has no rendezvous",
                where=env.MASTER_PORT,
                remedy=f"start the ranks with rlhpc, or set {env.MASTER_ADDR} and {env.MASTER_PORT}",
            )
        return info

    @property
    def place(self) -> str:
        """Name of the node, unique even if several nodes (containers, say) share a host name."""
        return f"{self.node}-{self.rank - self.local_rank}"
