"""Memory of one model of a run on one rank, as phases add it up; each back end has its own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from rlhpc.config.training import MemorySection
from rlhpc.plan.estimates.optimizer_memory import StateBytes
from rlhpc.sharding.layout import ParallelLayout


@dataclass(frozen=True)
class Tokens:
    """Tokens of a microbatch on a rank, in training and in forward passes, and the microbatches of an update."""

    trained: int
    passed: int
    microbatches: int


class RankModel(ABC):
    """One model on one rank. ``state``: its bytes between updates, before any offload."""

    name: str
    state: StateBytes
    tokens: Tokens
    trained: bool

    @property
    @abstractmethod
    def layout(self) -> ParallelLayout:
        """Which ranks share a batch."""

    @property
    @abstractmethod
    def memory(self) -> MemorySection:
        """The model's settings."""

    @property
    @abstractmethod
    def update_parts(self) -> Mapping[str, int]:
        """Bytes at the peak of an update's passes, beside the state in it."""

    @property
    @abstractmethod
    def pass_parts(self) -> Mapping[str, int]:
        """Peak bytes of a forward pass without gradients, beside the state."""

    @property
    @abstractmethod
    def saved_on_cpu(self) -> int:
        """Bytes of the copies in CPU memory that a checkpoint is written from."""

    @property
    @abstractmethod
    def activations_on_cpu(self) -> int:
        """Bytes of activations that wait in CPU memory at the peak of an update."""

    @property
    def weights(self) -> int:
        """Bytes of the weights, wherever they are."""
        return self.state.parameters

    @property
    def updating_state(self) -> StateBytes:
        """Bytes in an update, with gradients."""
        return self.state

    @cached_property
    def idle_state(self) -> StateBytes:
        """Bytes left on the GPU after offload as configured."""
        return self.remaining(keep_weights=False)

    def remaining(self, *, keep_weights: bool) -> StateBytes:
        """Returns what offload leaves, in the back end's order: gradients, optimizer, weights, in whole buffers."""
        section, state = self.memory.offload, self.state
        selected = {
            "gradients": self.trained and section.gradients,
            "optimizer": self.trained and section.optimizer,
            "parameters": section.parameters,
        }
        sizes = {"gradients": state.gradients, "optimizer": state.optimizer, "parameters": state.parameters}
        wanted = section.fraction * sum(size for kind, size in sizes.items() if selected[kind])
        gone = dict.fromkeys(sizes, 0)
        for kind, size in sizes.items():
            if selected[kind] and wanted > 0:
                gone[kind] = min(size, int(wanted)) if kind == "optimizer" else size
                wanted -= gone[kind]
        if keep_weights:
            gone["parameters"] = 0
        master = max(0, state.master - gone["optimizer"])
        return StateBytes(
            state.parameters - gone["parameters"],
            state.gradients - gone["gradients"],
            master,
            state.optimizer - gone["optimizer"] - master,
            state.cpu,
            state.staging,
        )
