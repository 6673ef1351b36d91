"""Sections of the batch job: what it asks Slurm for, its container, and how it recovers."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rlhpc.config.section import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Section

_MIB = {"K": 1 / 1024, "M": 1, "G": 1024, "T": 1024**2}


def memory_mib(text: str | int) -> float:
    """Of slurm.memory: 480G, or MiB without a unit."""
    unit = str(text)[-1]
    return float(str(text)[:-1]) * _MIB[unit] if unit in _MIB else float(text)


class ContainerSection(Section):
    """The ranks run in a container; the launcher around them does not."""

    runtime: Literal["apptainer", "pyxis"]
    """Which one the site has: `apptainer exec` (or singularity), or srun's --container-image (Enroot)."""
    image: str
    """Image file or address, as the runtime takes it; rlhpc and what it trains with are installed inside."""
    mounts: list[Annotated[str, Field(pattern=r"^/[^,]*$")]] = []
    """Host folders to mount, /path or /path:/inside[:ro]; the run folder, model and data are added by themselves."""
    python: str = "python3"
    """The Python inside the image."""
    options: list[str] = []
    """Further options of `apptainer exec`, or of srun for Pyxis."""


class SlurmSection(Section):
    """The batch job that `rlhpc submit` asks for. What is left out is the site's default."""

    nodes: PositiveInt | tuple[PositiveInt, PositiveInt] = 1
    """Nodes of the job, or [least, most]: it starts with what is free, and may come back with another number."""
    time: PositiveInt | Annotated[str, Field(pattern=r"^(\d+|\d+:\d\d(:\d\d)?|\d+-\d+(:\d\d){0,2})$")] | None = None
    """Time limit as Slurm takes it: minutes, HH:MM:SS or D-HH:MM:SS. A longer run saves in time and is requeued."""
    partition: str | None = None
    """Partition."""
    account: str | None = None
    """Account that is charged."""
    qos: str | None = None
    """Quality of service."""
    reservation: str | None = None
    """Reservation."""
    constraint: str | None = None
    """Node features."""
    comment: str | None = None
    """Comment shown to administrators; everyone on the cluster can read it."""
    exclude: list[str] = []
    """Nodes never to be used."""
    exclusive: bool = False
    """Share the nodes with no other job."""
    gpus_per_node: NonNegativeInt | None = None
    """GPUs on each node; default: one for each rank. 0: ranks compute on the CPU."""
    gpu_type: str | None = None
    """Kind of GPU by the site's name, such as h100."""
    cpus_per_rank: PositiveInt | None = None
    """CPU cores of each rank."""
    memory: NonNegativeInt | Annotated[str, Field(pattern=r"^\d+[KMGT]?$")] | None = None
    """Host memory of each node, such as 480G, or a number of MiB; 0: all of it."""
    modules: list[str] = []
    """Environment modules to load, in this order."""
    conda: str | None = None
    """Conda environment to activate, by name or folder."""
    environment: dict[Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$")], str] = {}
    """Environment variables of the job."""
    setup: list[str] = []
    """Shell lines run on the first node, before the ranks start."""
    container: ContainerSection | None = None
    interface: str | None = None
    """Network interface of NCCL and gloo on every node; default: the one that leads to the first node."""
    cpu_bind: str | None = None
    """srun's --cpu-bind, such as cores; default: the site's."""
    sbatch_options: dict[str, str | int | bool] = {}
    """Further options of sbatch by their long names without --."""
    srun_options: list[str] = []
    """Further options of srun, as written on its command line."""
    port: Annotated[int, Field(ge=1024, le=65535)] | None = None
    """Port of the rendezvous on the first node; default: 20000 + job id modulo 10000. Another one if it is taken."""

    @property
    def least_nodes(self) -> int:
        return self.nodes if isinstance(self.nodes, int) else self.nodes[0]

    @property
    def most_nodes(self) -> int:
        return self.nodes if isinstance(self.nodes, int) else self.nodes[1]


class RecoverySection(Section):
    """What a Slurm job does by itself when it fails. Wrong input and errors of the user's code stop it at once."""

    retries: NonNegativeInt = 5
    """Most failures in a row; one that comes after a newer checkpoint counts from one again."""
    wait_seconds: NonNegativeFloat = 120.0
    """Pause before a retry."""
    non_finite: Literal["retry", "stop"] = "stop"
    """train.max_skipped_updates in a row were skipped, or weights are not finite. A retry repeats the steps since the
    newest checkpoint, which helps only if a device was at fault."""
    out_of_memory: Literal["shrink", "stop"] = "shrink"
    """shrink: halve train.tokens_per_microbatch, or on the engine's side rollout.max_num_seqs, and go on."""
    network: Literal["retry", "stop"] = "retry"
    """Lost connections, NCCL and gloo timeouts: retry, waiting twice as long each time."""
    bad_node: Literal["exclude", "retry", "stop"] = "exclude"
    """GPU or node faults, and a node on which ranks die twice in a row: leave it out of the job from then on."""
    hang: Literal["retry", "stop"] = "retry"
    """No rank made progress for hang_timeout_seconds."""
    disk_full: Literal["retry", "stop"] = "retry"
    """Disk or quota exhausted: retry, waiting twice as long each time."""
    storage: Literal["retry", "stop"] = "retry"
    """The file system failed for longer than storage_wait_seconds: retry, waiting twice as long each time."""
    storage_wait_seconds: NonNegativeFloat = 300.0
    """Longest wait for a failing file system (I/O error, stale handle, read-only); less than hang_timeout_seconds."""
    crash: Literal["retry", "stop"] = "retry"
    """A rank died by a signal, srun could not start the ranks, or an error that fits no other cause."""
    hang_timeout_seconds: PositiveFloat = 1800.0
    """So long without progress of any rank is a hang: all Python stacks are written and the job's ranks ended."""
    start_seconds: PositiveFloat = 1800.0
    """The same, from the start of the ranks to their first step: models are built and loaded in between."""
