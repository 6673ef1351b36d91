"""Sections of the policy: the actor that learns, and the frozen reference."""

from __future__ import annotations

from rlhpc.config.section import Section
from rlhpc.config.training import FrozenMemorySection, MemorySection, MoeSection, OptimizerSection, ParallelSection


class ActorSection(Section):
    """The policy in training."""

    parallel: ParallelSection = ParallelSection()
    optimizer: OptimizerSection = OptimizerSection()
    """Optimizer of the RL phase; the warm-up's is sft.optimizer."""
    memory: MemorySection = MemorySection()
    moe: MoeSection = MoeSection()


class ReferenceSection(Section):
    """Frozen copy of the policy, for the KL term. Its parallel layout and router data type are the actor's."""

    memory: FrozenMemorySection = FrozenMemorySection()
