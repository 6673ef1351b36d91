"""What a run needs of each GPU, phase by phase, and of each node's memory: foretold from config and model shape."""

from __future__ import annotations

from dataclasses import dataclass

from rlhpc.config.schema import RunConfig
from rlhpc.models import ModelShape
from rlhpc.plan.layout import ParallelLayout
from rlhpc.plan.optimizer_memory import state_bytes

GIB = 1 << 30


@dataclass(frozen=True)
class PhaseMemory:
    """Bytes on the GPU at the fullest moment of a phase, by what they are for."""

    name: str
    parts: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())


@dataclass(frozen=True)
class HostMemory:
    """Bytes in host memory of one rank, by what they are for, and of the ranks of its node together."""

    parts: dict[str, int]
    ranks_per_node: int

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    @property
    def node(self) -> int:
        return self.total * self.ranks_per_node


@dataclass(frozen=True)
class MemoryPlan:
    """Of one rank. ``gpu_bytes``: what a GPU has, None where it is not known."""

    rank: int
    phases: tuple[PhaseMemory, ...]
    host: HostMemory
    gpu_bytes: int | None = None

    @property
    def peak(self) -> int:
        return max(phase.total for phase in self.phases)

    @property
    def first_too_large(self) -> PhaseMemory | None:
        """The first phase that does not fit into the GPU."""
        if self.gpu_bytes is None:
            return None
        return next((phase for phase in self.phases if phase.total > self.gpu_bytes), None)


def predict_memory(
    config: RunConfig, shape: ModelShape, layout: ParallelLayout, gpu_gib: float | None = None
) -> MemoryPlan:
    """The plan of the rank that needs most. Without ``gpu_gib`` the KV cache is as large as one full batch needs."""
    each = layout.world_size // layout.pp
    plans = (rank_memory(config, shape, layout, stage * each, gpu_gib) for stage in range(layout.pp))
    return max(plans, key=lambda plan: plan.peak)


def rank_memory(
    config: RunConfig, shape: ModelShape, layout: ParallelLayout, rank: int, gpu_gib: float | None = None
) -> MemoryPlan:
    """The plan of one rank."""
    state = state_bytes(shape, layout, rank, config.model.dtype, host_fraction=config.train.optimizer.host_fraction)
    parts = {"weights": state.parameters, "gradients": state.gradients, "optimizer": state.optimizer}
    gpu_bytes = None if gpu_gib is None else int(gpu_gib * GIB)
    return MemoryPlan(
        rank,
        (PhaseMemory("update", parts),),
        HostMemory({"moments": state.host}, config.resources.ranks_per_node),
        gpu_bytes,
    )
