"""The critic's section: the second model that PPO trains."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from rlhpc.config.section import NonNegativeInt, PositiveFloat, PositiveInt, Section
from rlhpc.config.training import CriticMoeSection, MemorySection, OptimizerSection, ParallelSection


class CriticOptimizerSection(OptimizerSection):
    learning_rate: PositiveFloat = 1e-5
    """Peak learning rate."""


class CriticSection(Section):
    """Value model of ppo; other algorithms have none."""

    on: Literal["trainers", "judges"] = "trainers"
    """Ranks that have it: those that train, or judges (their own), which need placement separate or lend."""
    path: Path | None = None
    """Path to another model with the same vocabulary, such as a reward model; default: the actor's weights at the start
    of RL."""
    parallel: ParallelSection | None = None
    """Parallel layout; default: the actor's."""
    optimizer: CriticOptimizerSection = CriticOptimizerSection()
    memory: MemorySection | None = None
    """Memory savings; default: the actor's, on judges without its offload."""
    moe: CriticMoeSection | None = None
    """Mixture-of-experts settings; default: the actor's, without router replay."""
    tokens_per_microbatch: PositiveInt | None = None
    """Maximum tokens per rank in one forward and backward pass; default: train.tokens_per_microbatch."""
    warmup_steps: NonNegativeInt = 0
    """Number of first RL steps in which only the critic is trained."""
    value_clip: PositiveFloat | None = 0.5
    """Clip range of a value around its value before the step's updates (Schulman et al. 2017, as in their code); null:
    no clipping."""
