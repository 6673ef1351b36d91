"""Inputs of `rlhpc plan`: the GPU and a run's lengths. A run itself depends on none of them."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from rlhpc.config.section import PositiveInt, Section


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
