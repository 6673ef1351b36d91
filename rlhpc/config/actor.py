"""Sections of the policy: the actor that learns, and the frozen reference."""

from __future__ import annotations

from typing import Literal

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
    """Frozen copy of the policy, for the KL term. Its router data type is the actor's."""

    on: Literal["trainers", "judges", "engines"] = "trainers"
    """Ranks that have it: those that train, judges (their own), or each engine. Others than trainers need placement
    separate or lend."""
    parallel: ParallelSection | None = None
    """Parallel layout on judges; on trainers it is the actor's, with the engines tp is rollout.tp."""
    memory: FrozenMemorySection = FrozenMemorySection()
