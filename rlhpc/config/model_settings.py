"""Settings of one model of a run, whichever section of the configuration they come from."""

from __future__ import annotations

from dataclasses import dataclass, field

from rlhpc.config.training import ExpertsSection, MemorySection, OptimizerSection, ParallelSection


@dataclass(frozen=True)
class ModelSettings:
    """How one model is sharded, stored and trained."""

    parallel: ParallelSection
    memory: MemorySection = field(default_factory=MemorySection)
    moe: ExpertsSection = field(default_factory=ExpertsSection)
    optimizer: OptimizerSection | None = None  # None: frozen
