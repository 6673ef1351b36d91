"""Inputs of the planner: figures of a site's machines, defaults of its Slurm, a run's lengths."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, GetJsonSchemaHandler
from pydantic_core import CoreSchema

from rlhpc.config.jobs import SiteSlurmSection
from rlhpc.config.section import PositiveInt, Section

# Bounds that a typing error passes and no machine does.
_Share = Annotated[float, Field(ge=1e-7, le=1)]
_Microseconds = Annotated[float, Field(ge=0, le=1e9)]
_Figure = Annotated[float, Field(ge=1e-6, le=1e9)]


class PhasesSection(Section):
    """Measured over predicted seconds of each phase that a run measures; predictions are multiplied by them."""

    weight_sync: _Figure = 1.0
    """Measured over predicted seconds of the weight sync."""
    rollout: _Figure = 1.0
    """Measured over predicted seconds of the rollout."""
    reward_model: _Figure = 1.0
    """Measured over predicted seconds of the reward model's passes."""
    log_probs: _Figure = 1.0
    """Measured over predicted seconds of log-prob passes, the reference's and a critic's included."""
    update: _Figure = 1.0
    """Measured over predicted seconds of updates."""


class EfficiencySection(Section):
    """Fraction of data-sheet figures reached; `rlhpc plan calibrate` prints `phases` from a run of your own."""

    compute: _Share = 0.57
    """Fraction of peak FLOP/s in training, log-prob passes and prefill."""
    memory: _Share = 0.7
    """Fraction of GPU memory bandwidth in training."""
    decode: _Share = 0.7
    """Fraction of GPU memory bandwidth in decoding."""
    node: _Share = 0.7
    """Fraction of the bandwidth between GPUs of a node."""
    network: _Share = 0.6
    """Fraction of the network adapters' bandwidth."""
    cpu_memory: _Share = 0.5
    """Fraction of the bandwidth of CPU memory and of the link to it."""
    kernel_us: _Microseconds = 22.2
    """Time from kernel to kernel where Python launches each, in microseconds: decoding without CUDA graphs."""
    graph_us: _Microseconds = 3.0
    """Time from kernel to kernel inside a CUDA graph, in microseconds."""
    launch_us: _Microseconds = 8.0
    """Time from kernel to kernel in training, in microseconds; counts where kernels are shorter."""
    message_us: _Microseconds = 10.0
    """Latency of a collective per doubling of its ranks inside a node, in microseconds; twice that between nodes."""
    phases: PhasesSection = PhasesSection()


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


class GpuEntry(Section):
    """A GPU of the site. Figures that are left out are those of the GPU that ``like`` names, else of the same name."""

    like: str | None = None
    """Name of a known GPU that the rest is taken from, such as h100."""
    tflops: _Figure | None = None
    """Dense bfloat16 peak, in TFLOP/s."""
    memory_gib: _Figure | None = None
    """GPU memory as the driver reports it, in GiB."""
    memory_gbps: _Figure | None = None
    """Bandwidth of GPU memory, in GB/s."""
    node_gbps: _Figure | None = None
    """Bandwidth to all linked GPUs together, in GB/s, one direction."""
    network_gbps: _Figure | None = None
    """Share of the node's network adapters, in GB/s, one direction."""
    cpu_link_gbps: _Figure | None = None
    """Bandwidth to CPU memory, in GB/s, one direction."""
    cpu_memory_gbps: _Figure | None = None
    """Share of the bandwidth of CPU memory, in GB/s."""
    per_node: PositiveInt | None = None
    """Number of GPUs per node."""
    linked: PositiveInt | None = None
    """Number of GPUs that reach each other without the network."""
    cpu_memory_gib: _Figure | None = None
    """CPU memory per node, in GiB."""
    context_gib: _Figure | None = None
    """GPU memory of a rank's CUDA context, workspaces and communicators, in GiB."""
    sleeping_engine_gib: _Figure | None = None
    """GPU memory of a sleeping engine's CUDA graphs and communicators, in GiB."""
    driver: Annotated[str, Field(pattern=r"^\d+(\.\d+){0,2}$")] | None = None
    """Version of the NVIDIA driver, in quotes: "570.86"."""


class SiteFigures(Section):
    """Figures that `rlhpc plan` and the checks of a run compute with."""

    gpus: dict[str, GpuEntry] = {}
    """GPUs by name: the site's own, or other figures of known ones."""
    efficiency: EfficiencySection = EfficiencySection()
    disk: DiskSection = DiskSection()


class SiteFile(SiteFigures):
    """A site file: figures of the machines and defaults of the slurm section."""

    slurm: SiteSlurmSection = SiteSlurmSection()


class SiteSection(SiteFigures):
    """Site file, and figures that take precedence over its own. `site: PATH` is short for `site: {file: PATH}`."""

    file: Path | None = None
    """Path to the site file; null: none. Without this key: the one that RLHPC_SITE names, else
    ~/.config/rlhpc/site.yaml if it exists."""


class PathOrSection:
    """Adds to a section's JSON schema that a path may be given in its place."""

    def __get_pydantic_json_schema__(self, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"anyOf": [handler(core_schema), {"type": "string", "format": "path"}]}


class PlanningSection(Section):
    """Inputs of `rlhpc plan` only; see docs/planning.md."""

    gpu: str | None = None
    """GPU that times are predicted for, such as h200; default: slurm.gpu_type where it names one."""
    prompt_tokens: PositiveInt | None = None
    """Mean length of a prompt; default: half of data.max_prompt_tokens."""
    response_tokens: PositiveInt | None = None
    """Mean length of a response; default: half of rollout.max_response_tokens."""
    response_spread: Annotated[float, Field(ge=0, le=4)] = 0.8
    """Standard deviation of the logarithm of response lengths: 0: all equal; 0.8: one in a hundred is six times as long
    as the median."""
    sampling_batches: Annotated[float, Field(ge=1)] = 1.0
    """Mean number of prompt batches per step with train.dynamic_sampling."""
    start_seconds: Annotated[float, Field(ge=0, le=1e6)] = 120.0
    """Time from a job's start to its first step, in seconds, without reading models and checkpoints."""
    node_mtbf_hours: Annotated[float, Field(gt=0, le=1e9)] = 6300.0
    """Mean time between failures of one node, in hours, for the recommended interval between checkpoints."""
