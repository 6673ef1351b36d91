"""Seconds for operations and bytes on one GPU and between GPUs, and a phase's seconds by what they are spent on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import log2

from rlhpc.config.site import EfficiencySection
from rlhpc.plan.estimates.hardware import Gpu, linked_ranks

Parts = Mapping[str, float]  # seconds by what limits them, one after the other

# What seconds are spent on.
LIMITS = {
    "compute": "matrix products",
    "memory": "device memory",
    "node": "links in the node",
    "network": "network",
    "messages": "latency of collectives",
    "kernels": "starting kernels",
    "pipeline": "waiting for other stages",
    "host": "host memory and the way to it",
}


@dataclass(frozen=True)
class MachineSpeed:
    """A GPU and how much of its figures is reached; ``ranks_per_node`` as the job has them."""

    gpu: Gpu
    efficiency: EfficiencySection
    ranks_per_node: int

    @property
    def without_gradient(self) -> MachineSpeed:
        """The same in passes without gradient."""
        own = {"compute": self.efficiency.forward_compute, "launch_us": self.efficiency.forward_launch_us}
        given = {name: value for name, value in own.items() if value is not None}
        return replace(self, efficiency=self.efficiency.model_copy(update=given)) if given else self

    @property
    def linked(self) -> int:
        """Neighbouring ranks that need no network between them."""
        return linked_ranks(self.ranks_per_node, self.gpu)

    @property
    def peak(self) -> float:
        """Operations a second of the data sheet."""
        return self.gpu.tflops * 1e12

    def compute(self, flops: float) -> float:
        return flops / (self.peak * self.efficiency.compute)

    def memory(self, size: float) -> float:
        """Bytes read and written in the device's memory."""
        return size / (self.gpu.memory_gbps * 1e9 * self.efficiency.memory)

    def decode(self, size: float) -> float:
        """The same while tokens are decoded."""
        return size / (self.gpu.memory_gbps * 1e9 * self.efficiency.decode)

    def to_cpu(self, size: float) -> float:
        """Bytes between device and host, one way."""
        return size / (self.gpu.cpu_link_gbps * 1e9 * self.efficiency.cpu_memory)

    def cpu_memory(self, size: float) -> float:
        """Bytes read and written in the host's memory by one rank's share of its cores."""
        return size / (self.gpu.cpu_memory_gbps * 1e9 * self.efficiency.cpu_memory)

    def ring(self, size: float, ranks: int, stride: int = 1, messages: float = 1) -> dict[str, float]:
        """``size`` bytes that each of ``ranks``, ``stride`` apart, sends to its neighbour, in so many collectives."""
        if ranks == 1:
            return {}
        if ranks * stride <= self.linked:
            return {"node": size / self._node, "messages": messages * self._latency(ranks, 1)}
        inside = max(1, min(ranks, self.linked // stride))  # all their adapters carry the ring
        slowest = min(self._network * inside, self._node)
        return {"network": size / slowest, "messages": messages * self._latency(inside, -(-ranks // inside))}

    def exchange(self, size: float, ranks: int, stride: int = 1, messages: float = 1) -> dict[str, float]:
        """``size`` bytes that each of the ranks sends to all others in equal parts."""
        if ranks == 1:
            return {}
        inside = max(1, min(ranks, self.linked // stride))
        across = (ranks - inside) / (ranks - 1)
        return {
            "node": size * (1 - across) / self._node,
            "network": size * across / self._network,
            "messages": messages * self._latency(inside, -(-ranks // inside)),
        }

    @property
    def _node(self) -> float:
        return self.gpu.node_gbps * 1e9 * self.efficiency.node

    @property
    def _network(self) -> float:
        return self.gpu.network_gbps * 1e9 * self.efficiency.network

    def _latency(self, inside: int, nodes: int) -> float:
        return 1e-6 * self.efficiency.message_us * (log2(max(2, inside)) + 2 * log2(max(1, nodes)))


@dataclass(frozen=True)
class PhaseTime:
    """One phase of a step, of the rank that takes longest."""

    name: str
    parts: Parts
    flops: float = 0.0  # the model's arithmetic, of all ranks together
    sent: float = 0.0  # bytes that a rank sends to others
    notes: Mapping[str, float] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def limit(self) -> str:
        """What most of it is spent on: a key of LIMITS."""
        return max(self.parts, key=lambda part: self.parts[part], default="compute")


def total(*several: Parts) -> dict[str, float]:
    """The seconds of all, by what they are spent on."""
    return _sum((parts, 1.0) for parts in several)


def times(parts: Parts, count: float) -> dict[str, float]:
    """The same so many times."""
    return _sum([(parts, count)])


def _sum(weighted: Iterable[tuple[Parts, float]]) -> dict[str, float]:
    result: dict[str, float] = {}
    for parts, weight in weighted:
        for name, seconds in parts.items():
            result[name] = result.get(name, 0.0) + weight * seconds
    return result
