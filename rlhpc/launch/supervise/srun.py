"""The srun command that starts a run's ranks, and their environment. Pure; for Slurm 22.05 and later."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from rlhpc.config.schema import RunConfig
from rlhpc.core import env
from rlhpc.core.folder import AttemptFolder
from rlhpc.launch.container import container_environment, exec_command, pyxis_options
from rlhpc.launch.machine import backend_environment, common_environment, gpu_check_seconds
from rlhpc.launch.roles import parts_of
from rlhpc.launch.worker.nsys import nsys_environment


def srun_command(
    config: RunConfig,
    nodes: Sequence[str],
    attempt: AttemptFolder,
    entry: str = "",
    groups: Sequence[Sequence[str]] = (),
    python: str = "",
) -> list[str]:
    """Command with one task per rank on ``nodes``, block by block on nodes and on their sockets, each with its own log.

    ``groups``: nodes of each group of a heterogeneous job, used or not; all ranks are one world, numbered through the
    groups in order. ``python``: the ranks' interpreter outside of a container; default: this one.
    """
    program = _program(config, attempt, entry, python or sys.executable)
    if len(groups) < 2:
        log = f"--output={attempt.logs}/rank-%5t.log"
        return ["srun", *_options(config, nodes), log, *_container_options(config, attempt), *program]
    command = []
    for number, group in enumerate(groups):
        part = [node for node in group if node in nodes]
        if part:
            options = [*_options(config, part), *_container_options(config, attempt)]
            # In 22.05 the %t of later groups is not the rank's number.
            command += [":", f"--het-group={number}", *options, *_into_log(attempt), *program]
    return ["srun", *command[1:]]


def first_commands(config: RunConfig, nodes: Sequence[str], attempt: AttemptFolder) -> list[list[str]]:
    """The commands that start all ranks of an attempt on ``nodes``."""
    per_node = config.resources.ranks_per_node
    world_size = len(nodes) * per_node
    parts = parts_of(config, world_size)
    if parts == [range(world_size)]:
        return [srun_command(config, nodes, attempt)]
    blocks = [block for part in parts for block in blocks_of(part, nodes, per_node)]
    return [block_command(config, block, attempt) for block in blocks]


@dataclass(frozen=True)
class RankBlock:
    """Consecutive ranks of a job, equally many on each of ``nodes``. ``local``: local rank of the first one;
    ``generation``: number of their starts before."""

    ranks: range
    nodes: tuple[str, ...]
    local: int
    generation: int = 0

    @property
    def name(self) -> str:
        """Name of its job step."""
        return f"ranks-{self.ranks.start}-{self.ranks[-1]}"

    def fills_nodes(self, per_node: int) -> bool:
        """True if its nodes have no other ranks."""
        return len(self.ranks) == len(self.nodes) * per_node


def blocks_of(
    ranks: range, nodes: Sequence[str], per_node: int, generation: int = 0, first_rank: int = 0
) -> list[RankBlock]:
    """Consecutive ranks as blocks: a part of a node, whole nodes, a part of a node. ``nodes``: those of the whole job,
    with ``per_node`` ranks each; ``first_rank``: the first of these."""
    found, first = [], ranks.start
    while first < ranks.stop:
        node, local = divmod(first - first_rank, per_node)
        whole = (ranks.stop - first) // per_node if not local else 0
        end = first + whole * per_node if whole else min(ranks.stop, first_rank + (node + 1) * per_node)
        found.append(RankBlock(range(first, end), tuple(nodes[node : node + max(1, whole)]), local, generation))
        first = end
    return found


def block_command(
    config: RunConfig, block: RankBlock, attempt: AttemptFolder, entry: str = "", python: str = ""
) -> list[str]:
    """``srun_command`` for a block of the ranks, as a job step of its own.

    Steps that share a node are not bound to cores, because with --overlap Slurm may give the same ones to all: ranks
    bind themselves.
    """
    options = _options(config, block.nodes, len(block.ranks) // len(block.nodes))
    return [
        *("srun", f"--job-name={block.name}", *options, *_container_options(config, attempt, block)),
        *_into_log(attempt, block.ranks.start),
        *_program(config, attempt, entry, python or sys.executable),
    ]


def _options(config: RunConfig, nodes: Sequence[str], tasks_per_node: int | None = None) -> list[str]:
    """Options of srun. ``--kill-on-bad-exit``: the first rank that fails ends the others within a third of a second.
    ``--overlap``: a step that Slurm is still cleaning up does not delay the next one. ``--export``: ranks have this
    process's environment with any --export of the job."""
    slurm, ranks = config.slurm, tasks_per_node or config.resources.ranks_per_node
    options = [
        f"--nodes={len(nodes)}",
        f"--nodelist={','.join(nodes)}",
        f"--ntasks={len(nodes) * ranks}",
        f"--ntasks-per-node={ranks}",
        "--distribution=block:block",
        "--kill-on-bad-exit=1",
        "--mpi=none",
        "--overlap",
        "--unbuffered",
        "--open-mode=append",
        "--input=none",
        "--export=ALL",
    ]
    if ranks < config.resources.ranks_per_node:
        return [*options, "--cpu-bind=none"]
    if slurm.cpus_per_rank is not None:
        options.append(f"--cpus-per-task={slurm.cpus_per_rank}")  # 22.05 to 23.02 do not inherit it
    if slurm.cpu_bind is not None:
        options.append(f"--cpu-bind={slurm.cpu_bind}")
    return options


def _container_options(config: RunConfig, attempt: AttemptFolder, block: RankBlock | None = None) -> list[str]:
    """Options for the container, and the user's own."""
    ours = _settings(config, 0, "", (0, b""), 0, block)
    return [*pyxis_options(config, attempt.run.path, ours.keys()), *config.slurm.srun_options]


def _program(config: RunConfig, attempt: AttemptFolder, entry: str, python: str) -> list[str]:
    """Command of a rank."""
    container = config.slurm.container
    python = python if container is None else container.python
    return [
        *exec_command(config, attempt.run.path),
        *(python, "-u", "-m", "rlhpc.launch.worker.main", str(attempt.path)),
        *([entry] if entry else []),
    ]


def _into_log(attempt: AttemptFolder, first: int = 0) -> list[str]:
    """Prefix that redirects a rank's output into its log. ``first``: the job's number of the step's first rank."""
    rank = f"$(({first} + SLURM_PROCID))" if first else "$SLURM_PROCID"
    return ["bash", "-c", f'exec "$@" >>"$0/rank-$(printf %05d "{rank}").log" 2>&1', str(attempt.logs)]


def srun_environment(
    config: RunConfig,
    world_size: int,
    master: str,
    store: tuple[int, bytes],
    port: int,
    block: RankBlock | None = None,
) -> dict[str, str]:
    """The job's environment with the variables of ranks, all or a block of them. ``store``: port and secret of the
    job's key-value store on ``master``; ``port``: a free one there, for stores of libraries."""
    inherited = {name: value for name, value in os.environ.items() if not _replaced(name, value)}
    settings = _settings(config, world_size, master, store, port, block)
    return container_environment(config, {**inherited, **settings}, settings.keys())


def _settings(
    config: RunConfig, world_size: int, master: str, store: tuple[int, bytes], port: int, block: RankBlock | None
) -> dict[str, str]:
    """The variables of ranks, besides the job's."""
    resources, slurm = config.resources, config.slurm
    cores = max(1, int(os.environ.get(env.SLURM_CPUS_ON_NODE, "1")) // resources.ranks_per_node)
    threads = resources.threads_per_rank or slurm.cpus_per_rank or cores
    settings = {
        **common_environment(master, port, threads, gpus=slurm.gpus_per_node != 0),
        **backend_environment(config, gpus=slurm.gpus_per_node != 0),
        env.RLHPC_WORLD_SIZE: str(world_size),
        env.RLHPC_STORE: f"{master}:{store[0]}",
        env.RLHPC_STORE_SECRET: store[1].hex(),
        **nsys_environment(config.profile),
    }
    if slurm.gpus_per_node != 0:
        settings[env.RLHPC_GPU_SECONDS] = gpu_check_seconds()
    if slurm.cpus_per_rank is not None and (block is None or block.fills_nodes(resources.ranks_per_node)):
        settings[env.SRUN_CPUS_PER_TASK] = str(slurm.cpus_per_rank)
    if block is not None:
        settings |= {
            env.RLHPC_FIRST_RANK: str(block.ranks.start),
            env.RLHPC_FIRST_LOCAL_RANK: str(block.local),
            env.RLHPC_GENERATION: str(block.generation),
            env.RLHPC_RANKS_PER_NODE: str(resources.ranks_per_node),
        }
        if not block.fills_nodes(resources.ranks_per_node) and slurm.cpu_bind not in ("none", "no", "n"):
            settings[env.RLHPC_OWN_CORES] = "1"
    if slurm.interface is not None:
        settings |= {env.GLOO_SOCKET_IFNAME: slurm.interface, env.NCCL_SOCKET_IFNAME: slurm.interface}
    return settings


# Variables of another launcher, which would take precedence over Slurm's, and of a job whose environment is not the
# submitting shell's.
_NOT_OURS = {
    *(env.RANK, env.WORLD_SIZE, env.LOCAL_RANK, env.LOCAL_WORLD_SIZE, env.RLHPC_ROLE, env.RLHPC_GPU_SECONDS),
    *(env.SLURM_EXPORT_ENV, env.SBATCH_EXPORT),
}


def _replaced(name: str, value: str) -> bool:
    """True if ranks must not inherit a variable. From 23.11 on sbatch's --cpus-per-task is in SLURM_TRES_PER_TASK too,
    and srun refuses to start if it contradicts another number of cores."""
    return name in _NOT_OURS or (name == env.SLURM_TRES_PER_TASK and "gpu" not in value)
