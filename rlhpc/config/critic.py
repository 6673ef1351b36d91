"""The critic's section: the second model that PPO trains."""

from __future__ import annotations

from pathlib import Path

from rlhpc.config.section import NonNegativeInt, PositiveFloat, PositiveInt, Section
from rlhpc.config.training import MemorySection, OptimizerSection, ParallelSection


class CriticOptimizerSection(OptimizerSection):
    learning_rate: PositiveFloat = 1e-5
    """Highest rate of the schedule."""


class CriticSection(Section):
    """A model with a value head that says what a token's sequence so far promises; algorithms other than ppo have
    none."""

    model: Path | None = None
    """Folder of another model with the same vocabulary, such as a reward model; default: the weights that the actor
    begins RL with, under a head of zeros."""
    parallel: ParallelSection | None = None
    """How it is cut; default: like the actor."""
    optimizer: CriticOptimizerSection = CriticOptimizerSection()
    memory: MemorySection | None = None
    """How it is made to fit; default: like the actor."""
    tokens_per_microbatch: PositiveInt | None = None
    """Most tokens that a rank takes through it at once; default: train.tokens_per_microbatch."""
    warmup_steps: NonNegativeInt = 0
    """First RL steps, in which only the critic learns."""
    value_clip: PositiveFloat | None = 0.5
    """How far a value may move from what it was before the step's updates (Schulman et al. 2017, as in their code);
    null: as far as it will."""
