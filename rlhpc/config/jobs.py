"""Sections of the batch job: resources, container, recovery."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from rlhpc.config.section import NonNegativeInt, NonNegativeSeconds, PositiveInt, PositiveSeconds, Section

_Nodes = Annotated[int, Field(ge=1, le=100_000)]
SlurmTime = PositiveInt | Annotated[str, Field(pattern=r"^(\d+|\d+:\d\d(:\d\d)?|\d+-\d+(:\d\d){0,2})$")]
_MIB = {"K": 1 / 1024, "M": 1, "G": 1024, "T": 1024**2}


def memory_mib(text: str | int) -> float:
    """Value of slurm.memory in MiB: 480G, or a number without a unit."""
    unit = str(text)[-1]
    return float(str(text)[:-1]) * _MIB[unit] if unit in _MIB else float(text)


class SiteContainerSection(Section):
    """The site's way of running containers. Without an image it applies to runs that name one in slurm.container."""

    runtime: Literal["apptainer", "singularity", "pyxis"] | None = None
    """Container runtime of the site: apptainer (or singularity, if a node has only that), singularity, or pyxis: srun's
    --container-image (Enroot)."""
    image: str | None = None
    """Image file or address, as the runtime takes it; it must contain rlhpc and its packages."""
    mounts: list[Annotated[str, Field(pattern=r"^/[^,]*$")]] = []
    """Folders to mount, /path or /path:/inside[:ro]; run folder, working folder and all paths of the configuration are
    mounted automatically."""
    python: str = "python3"
    """Python inside the image."""
    options: list[str] = []
    """Additional options of `apptainer exec` or `singularity exec`, or of srun for Pyxis."""


class ContainerSection(SiteContainerSection):
    """Container of the ranks; the launcher runs outside it."""

    runtime: Literal["apptainer", "singularity", "pyxis"]
    """Container runtime of the site: apptainer (or singularity, if a node has only that), singularity, or pyxis: srun's
    --container-image (Enroot)."""
    image: str
    """Image file or address, as the runtime takes it; it must contain rlhpc and its packages."""


class SiteSlurmSection(Section):
    """Keys of the slurm section that a site file may give defaults for."""

    partition: str | None = None
    """Partition."""
    account: str | None = None
    """Account to charge."""
    qos: str | None = None
    """Quality of service."""
    cluster: Annotated[str, Field(pattern=r"^[\w.-]+$")] | None = None
    """Cluster that gets the job, as sbatch's --clusters, at sites with several; default: that of the login node."""
    constraint: str | None = None
    """Node features."""
    exclusive: bool = False
    """Exclusive use of the nodes."""
    gpus_per_node: NonNegativeInt | None = None
    """Number of GPUs per node; default: resources.ranks_per_node, of which one must be set; 0: ranks compute on the
    CPU."""
    gpu_type: str | None = None
    """GPU type by the site's name, such as h100, or a100_1g.5gb for a MIG instance."""
    gpu_request: Literal["gpus-per-node", "gres", "none"] = "gpus-per-node"
    """Request of GPUs by sbatch's --gpus-per-node, by --gres=gpu:N, or none where Slurm does not manage them."""
    cpus_per_rank: PositiveInt | None = None
    """Number of CPU cores per rank."""
    memory: NonNegativeInt | Annotated[str, Field(pattern=r"^\d+[KMGT]?$")] | None = None
    """CPU memory per node, such as 480G, or in MiB; 0: all of it."""
    modules: list[str] = []
    """Environment modules to load, in this order."""
    conda: str | None = None
    """Conda environment to activate, by name or folder."""
    environment_archive: Path | None = None
    """Python environment of the ranks as an archive with bin/python at its top, sent to each node's own disk (.tar.zst,
    .tar.gz, .tar, .sqsh)."""
    environment: dict[Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$")], str] = {}
    """Environment variables of the job."""
    setup: list[str] = []
    """Shell lines run on the first node before the ranks start."""
    container: SiteContainerSection | None = None
    interface: str | None = None
    """Network interface for NCCL and gloo on every node; default: the one that leads to the first node. The rendezvous
    uses any interface."""
    rendezvous_host: Annotated[str, Field(pattern=r"^([A-Za-z0-9._-]|\{node\})+$")] | None = None
    """Host name of the job's first node by which its ranks find it, such as `{node}i`; {node} is Slurm's name of the
    node, the default."""
    verify_connections: bool = True
    """Check of gloo's connections against the job's store before ranks use them. False where nodes see each other
    through address translation."""
    cpu_bind: str | None = None
    """CPU binding as srun's --cpu-bind, such as cores; default: the site's."""
    sbatch_options: dict[str, str | int | bool] = {}
    """Additional sbatch options by their long names without --."""
    srun_options: list[str] = []
    """Additional srun options, as written on its command line."""


class RolloutJobsSection(Section):
    """Jobs of their own for engines. slurm.nodes and rollout.nodes count their nodes too. They join and leave
    while the trainers' job goes on; see docs/asynchrony.md. Keys that are not set are those of the slurm section."""

    count: Annotated[int, Field(ge=1, le=1000)] = 1
    """Number of jobs."""
    nodes: PositiveInt | None = None
    """Number of nodes of each job; default: rollout.nodes divided by count. Other engines are in the trainers' job."""
    partition: str | None = None
    """Partition."""
    account: str | None = None
    """Account to charge."""
    qos: str | None = None
    """Quality of service."""
    constraint: str | None = None
    """Node features."""
    gpu_type: str | None = None
    """GPU type by the site's name."""
    time: SlurmTime | None = None
    """Time limit as Slurm takes it. A job that reaches it is requeued."""
    reservation: str | None = None
    """Reservation."""


class SlurmSection(SiteSlurmSection):
    """Batch job of `rlhpc submit`. Keys that are not set take the site file's value, else Slurm's default."""

    nodes: _Nodes | tuple[_Nodes, _Nodes] = 1
    """Number of nodes, or [minimum, maximum]: the job starts on what is free, and may return on another number."""
    time: SlurmTime | None = None
    """Time limit as Slurm takes it: minutes, HH:MM:SS or D-HH:MM:SS. A longer run checkpoints before it and is
    requeued."""
    reservation: str | None = None
    """Reservation."""
    comment: str | None = None
    """Comment shown to administrators; everyone on the cluster can read it."""
    exclude: list[str] = []
    """Nodes to exclude."""
    port: Annotated[int, Field(ge=1024, le=65535)] | None = None
    """Port of the rendezvous on the first node; default: 20000 + job id modulo 10000, or another if that is taken."""
    container: ContainerSection | None = None
    rollout_jobs: RolloutJobsSection | None = None

    @property
    def other_python(self) -> bool:
        """True if the ranks use another Python than the command that submits them."""
        return bool(self.conda or self.container or self.environment_archive)

    @property
    def least_nodes(self) -> int:
        return self.nodes if isinstance(self.nodes, int) else self.nodes[0]

    @property
    def most_nodes(self) -> int:
        return self.nodes if isinstance(self.nodes, int) else self.nodes[1]


class RecoverySection(Section):
    """Automatic recovery of a run. Wrong input and errors in user code stop it at once."""

    retries: NonNegativeInt = 5
    """Maximum consecutive failures; a newer checkpoint resets the count."""
    wait_seconds: NonNegativeSeconds = 120.0
    """Pause before a retry, in seconds."""
    non_finite: Literal["retry", "stop"] = "stop"
    """Action on train.max_skipped_updates consecutive skipped updates, or on non-finite weights. A retry helps only if
    a device was at fault."""
    out_of_memory: Literal["shrink", "stop"] = "shrink"
    """Action on lack of GPU memory: shrink halves train.tokens_per_microbatch, or rollout.max_num_seqs for the engine,
    and retries."""
    network: Literal["retry", "stop"] = "retry"
    """Action on lost connections and NCCL or gloo timeouts: retry doubles the pause each time."""
    bad_node: Literal["exclude", "retry", "stop"] = "exclude"
    """Action on GPU or node faults, and on a node where ranks die twice in a row: exclude leaves it out of the job."""
    hang: Literal["retry", "stop"] = "retry"
    """Action when no rank made progress for hang_timeout_seconds."""
    disk_full: Literal["retry", "stop"] = "retry"
    """Action on an exhausted disk or quota: retry doubles the pause each time."""
    storage: Literal["retry", "stop"] = "retry"
    """Action on a file system that failed for longer than storage_wait_seconds: retry doubles the pause each time."""
    storage_wait_seconds: NonNegativeSeconds = 300.0
    """Maximum wait for a failing file system (I/O error, stale handle, read-only), in seconds; less than
    hang_timeout_seconds."""
    crash: Literal["retry", "stop"] = "retry"
    """Action when a rank died by a signal, srun could not start the ranks, or no other cause fits."""
    lost_engines: Literal["restart", "rejoin"] = "restart"
    """Action when engines on ranks of their own are lost: restart ends the attempt; rejoin goes on without them, and
    starts them again."""
    engine_timeout_seconds: PositiveSeconds = 120.0
    """Time without a sign of life after which an engine is lost, in seconds, with lost_engines rejoin."""
    slow_engine_seconds: PositiveSeconds = 1800.0
    """Time in one step for which an engine may hold up the trainers before it counts as lost, in seconds, with
    lost_engines rejoin and the order of arrival."""
    hang_timeout_seconds: PositiveSeconds = 1800.0
    """Time without progress of any rank that counts as a hang, in seconds: Python stacks are written, the ranks
    ended."""
    start_seconds: PositiveSeconds = 1800.0
    """Time from the start of the ranks to their first step that counts as a hang, in seconds: models load in
    between."""
