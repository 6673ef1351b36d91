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
    """How much of a data sheet's figures is reached. `rlhpc plan --calibrate` fits these to a run of your own."""

    compute: _Share = 0.56
    """Of the peak of matrix products, in training, log-probs and prefill."""
    memory: _Share = 0.7
    """Of the device memory's bandwidth, in training."""
    decode: _Share = 0.7
    """The same in decoding."""
    node: _Share = 0.7
    """Of the bandwidth between the GPUs of a node."""
    network: _Share = 0.6
    """Of the network adapters' bandwidth."""
    weight_sync: _Share = 1.0
    """Of the speed that all of these let a weight sync have."""
    cpu_memory: _Share = 0.5
    """Of the bandwidth of the host's memory and of the way to it."""
    kernel_us: _Microseconds = 27.0
    """Microseconds from one kernel to the next where Python starts each of them: decoding without CUDA graphs."""
    graph_us: _Microseconds = 3.0
    """The same inside a CUDA graph."""
    launch_us: _Microseconds = 8.0
    """The same in training; counts where kernels end sooner."""
    forward_compute: _Share | None = None
    """compute in passes without gradient (log-probs, values, a reward model); default: compute."""
    forward_launch_us: _Microseconds | None = None
    """launch_us in passes without gradient; default: launch_us."""
    message_us: _Microseconds = 10.0
    """Microseconds that a collective takes beside its bytes, for each doubling of the ranks inside a node; between
    nodes twice that."""


class DiskSection(Section):
    """GB/s (10^9 bytes) of the file system that models are read from and checkpoints written to.

    The defaults are the "good" column for one node and for 32 of them in NVIDIA's DGX SuperPOD reference architecture
    (RA-11333-001, guidelines for storage performance).
    """

    node_read_gbps: _Figure = 4.0
    """That one node reads."""
    node_write_gbps: _Figure = 2.0
    """That one node writes."""
    read_gbps: _Figure = 15.0
    """That all nodes of a job read at most, together."""
    write_gbps: _Figure = 7.0
    """That all nodes of a job write at most, together."""


class PlanningSection(Section):
    """For `rlhpc plan` alone; see docs/planning.md."""

    gpu: str | None = None
    """Which GPU the time is foretold for, such as h200; default: slurm.gpu_type where that names one."""
    gpus_file: Path | None = None
    """YAML file of the site with GPUs of its own, or other figures of known ones."""
    prompt_tokens: PositiveInt | None = None
    """Mean length of a prompt; default: half of data.max_prompt_tokens."""
    response_tokens: PositiveInt | None = None
    """Mean length of a response; default: half of rollout.max_response_tokens."""
    response_spread: Annotated[float, Field(ge=0, le=4)] = 0.8
    """Standard deviation of the logarithm of a response's length: with 0 all are of one length, with 0.8 one in a
    hundred is six times as long as the median."""
    sampling_batches: Annotated[float, Field(ge=1)] = 1.0
    """Mean number of batches of prompts that a step with train.dynamic_sampling asks for."""
    efficiency: EfficiencySection = EfficiencySection()
    disk: DiskSection = DiskSection()
    start_seconds: Annotated[float, Field(ge=0, le=1e6)] = 120.0
    """From a job's begin to its first step, reading models and checkpoints apart: programs start, engines are built."""


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
