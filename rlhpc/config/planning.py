"""What `rlhpc plan` is told of the machine and of the run's lengths; nothing that a run itself depends on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from rlhpc.config.section import PositiveInt, Section

# Bounds that a typing error passes and no machine does.
_Share = Annotated[float, Field(ge=1e-7, le=1)]
_Microseconds = Annotated[float, Field(ge=0, le=1e9)]
_Figure = Annotated[float, Field(ge=1e-6, le=1e9)]


class EfficiencySection(Section):
    """Fraction of data-sheet figures reached. `rlhpc plan --calibrate` fits these to a run of your own."""

    compute: _Share = 0.56
    """Fraction of peak FLOP/s in training, log-prob passes and prefill."""
    memory: _Share = 0.7
    """Fraction of GPU memory bandwidth in training."""
    decode: _Share = 0.7
    """Fraction of GPU memory bandwidth in decoding."""
    node: _Share = 0.7
    """Fraction of the bandwidth between GPUs of a node."""
    network: _Share = 0.6
    """Fraction of the network adapters' bandwidth."""
    weight_sync: _Share = 1.0
    """Fraction of the weight-sync speed that all of these allow."""
    cpu_memory: _Share = 0.5
    """Fraction of the bandwidth of CPU memory and of the link to it."""
    kernel_us: _Microseconds = 27.0
    """Time from kernel to kernel where Python launches each, in microseconds: decoding without CUDA graphs."""
    graph_us: _Microseconds = 3.0
    """Time from kernel to kernel inside a CUDA graph, in microseconds."""
    launch_us: _Microseconds = 8.0
    """Time from kernel to kernel in training, in microseconds; counts where kernels are shorter."""
    forward_compute: _Share | None = None
    """Fraction of peak FLOP/s in forward passes (log-probs, values, reward model); default: compute."""
    forward_launch_us: _Microseconds | None = None
    """Time from kernel to kernel in forward passes, in microseconds; default: launch_us."""
    message_us: _Microseconds = 10.0
    """Latency of a collective per doubling of its ranks inside a node, in microseconds; twice that between nodes."""


class DiskSection(Section):
    """GB/s (10^9 bytes) of the file system that models are read from and checkpoints written to.

    The defaults are the "good" column for one node and for 32 of them in NVIDIA's DGX SuperPOD reference architecture
    (RA-11333-001, guidelines for storage performance).
    """

    node_read_gbps: _Figure = 4.0
    """Read bandwidth of one node, in GB/s."""
    node_write_gbps: _Figure = 2.0
    """Write bandwidth of one node, in GB/s."""
    read_gbps: _Figure = 15.0
    """Maximum read bandwidth of all nodes of a job together, in GB/s."""
    write_gbps: _Figure = 7.0
    """Maximum write bandwidth of all nodes of a job together, in GB/s."""


class PlanningSection(Section):
    """Inputs of `rlhpc plan` only; see docs/planning.md."""

    gpu: str | None = None
    """GPU that times are predicted for, such as h200; default: slurm.gpu_type where it names one."""
    gpus_file: Path | None = None
    """Path to the site's YAML file with its own GPUs, or other figures of known ones."""
    prompt_tokens: PositiveInt | None = None
    """Mean length of a prompt; default: half of data.max_prompt_tokens."""
    response_tokens: PositiveInt | None = None
    """Mean length of a response; default: half of rollout.max_response_tokens."""
    response_spread: Annotated[float, Field(ge=0, le=4)] = 0.8
    """Standard deviation of the logarithm of response lengths: 0: all equal; 0.8: one in a hundred is six times as long
    as the median."""
    sampling_batches: Annotated[float, Field(ge=1)] = 1.0
    """Mean number of prompt batches per step with train.dynamic_sampling."""
    efficiency: EfficiencySection = EfficiencySection()
    disk: DiskSection = DiskSection()
    start_seconds: Annotated[float, Field(ge=0, le=1e6)] = 120.0
    """Time from a job's start to its first step, in seconds, without reading models and checkpoints."""


class GpuEntry(Section):
    """A GPU in the site's file; what is left out is as in the entry named by ``like``."""

    like: str | None = None
    tflops: _Figure | None = None
    memory_gib: _Figure | None = None
    memory_gbps: _Figure | None = None
    node_gbps: _Figure | None = None
    network_gbps: _Figure | None = None
    cpu_link_gbps: _Figure | None = None
    cpu_memory_gbps: _Figure | None = None
    per_node: PositiveInt | None = None
    linked: PositiveInt | None = None
    cpu_memory_gib: _Figure | None = None
    context_gib: _Figure | None = None
    """GiB of each GPU's memory that a rank's CUDA context, workspaces and communicators take."""
    sleeping_engine_gib: _Figure | None = None
    """GiB that an engine's CUDA graphs and communicators keep while it sleeps."""
    driver: Annotated[str, Field(pattern=r"^\d+(\.\d+){0,2}$")] | None = None
    """Version of the NVIDIA driver, in quotes: "570.86"."""


class GpusFile(Section):
    """The site's file."""

    gpus: dict[str, GpuEntry] = {}
    efficiency: EfficiencySection = EfficiencySection()
    disk: DiskSection = DiskSection()
