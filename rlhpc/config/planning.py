"""What `rlhpc plan` is told of the machine and of the run's lengths; nothing that a run itself depends on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from rlhpc.config.section import Fraction, NonNegativeFloat, PositiveFloat, PositiveInt, Section


class EfficiencySection(Section):
    """How much of a data sheet's figures is reached. `rlhpc plan --calibrate` fits these to a run of your own."""

    compute: Fraction = 0.56
    """Of the peak of matrix products, in training, log-probs and prefill."""
    memory: Fraction = 0.7
    """Of the device memory's bandwidth, in training."""
    decode: Fraction = 0.7
    """The same in decoding."""
    node: Fraction = 0.7
    """Of the bandwidth between the GPUs of a node."""
    network: Fraction = 0.6
    """Of the network adapters' bandwidth."""
    push: Fraction = 1.0
    """Of the speed that all of these let a push of weights have."""
    host: Fraction = 0.5
    """Of the bandwidth of the host's memory and of the way to it."""
    kernel_us: NonNegativeFloat = 27.0
    """Microseconds from one kernel to the next where Python starts each of them: decoding without CUDA graphs."""
    graph_us: NonNegativeFloat = 3.0
    """The same inside a CUDA graph."""
    launch_us: NonNegativeFloat = 8.0
    """The same in training; counts where kernels end sooner."""
    message_us: NonNegativeFloat = 10.0
    """Microseconds that a collective takes beside its bytes, for each doubling of the ranks inside a node; between
    nodes twice that."""


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
    response_spread: NonNegativeFloat = 0.8
    """Standard deviation of the logarithm of a response's length: with 0 all are of one length, with 0.8 one in a
    hundred is six times as long as the median."""
    sampling_batches: Annotated[float, Field(ge=1)] = 1.0
    """Mean number of batches of prompts that a step with train.dynamic_sampling asks for."""
    efficiency: EfficiencySection = EfficiencySection()


class GpuEntry(Section):
    """A GPU in the site's file; what is left out is as in the entry named by ``like``."""

    like: str | None = None
    tflops: PositiveFloat | None = None
    memory_gib: PositiveFloat | None = None
    memory_gbps: PositiveFloat | None = None
    node_gbps: PositiveFloat | None = None
    network_gbps: PositiveFloat | None = None
    host_gbps: PositiveFloat | None = None
    host_memory_gbps: PositiveFloat | None = None
    per_node: PositiveInt | None = None
    linked: PositiveInt | None = None
    host_gib: PositiveFloat | None = None


class GpusFile(Section):
    """The site's file."""

    gpus: dict[str, GpuEntry] = {}
    efficiency: EfficiencySection = EfficiencySection()
