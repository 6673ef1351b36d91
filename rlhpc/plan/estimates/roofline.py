"""Roofline of a phase: kernels and traffic of each back end, seconds of operations and bytes, and the bottleneck."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import log2

from rlhpc.config.site import EfficiencySection
from rlhpc.plan.estimates.hardware import Gpu, linked_ranks


@dataclass(frozen=True)
class KernelCounts:
    """Counts of a layer's forward pass without its matrix products and attention, and of the head and optimizer.

    A pass is one read or write of a token's values in 16 bits. A backward pass takes twice as many.
    """

    hidden_passes: float  # over the hidden state: norms, residuals, rotation, routing
    feed_forward_passes: float  # over the feed-forward state: activation
    expert_passes: float  # over a token's copies for its experts: permutation, and sorting by expert
    logit_bytes: float  # per logit: a third of what forward and backward passes of the head move
    head_again: float  # share of the head's forward products that the backward pass makes again
    gradient_bytes: float  # per parameter and microbatch: added to a gradient of 32 bits
    update_bytes: float  # per parameter: gradient, master and both moments read; master, moments and weight written
    dense_kernels: int  # launched in a layer
    latent_kernels: int  # more with latent attention
    expert_kernels: int  # more with experts

    def in_layer(self, *, latent: bool, experts: bool) -> int:
        """Returns the kernels launched in a layer's forward pass."""
        return self.dense_kernels + latent * self.latent_kernels + experts * self.expert_kernels


# Of rlhpc/backends/megatron; `python -m tools.kernel_counts` computes those of a layer. Logits are written in 16 bits
# and read once, and once more in the backward pass, which makes them again and overwrites them with their gradient.
# Products add their result to the gradient.
RLHPC = KernelCounts(
    hidden_passes=9.4,
    feed_forward_passes=3,
    expert_passes=1.4,
    logit_bytes=14 / 3,
    head_again=1,
    gradient_bytes=8,
    update_bytes=30,
    dense_kernels=14,
    latent_kernels=14,
    expert_kernels=10,
)
# Of transformers' modules, an operation of PyTorch each: a norm moves 18 passes, as it computes in float32, a rotation
# 12 over queries and keys together, a sum of residual and output 3. Gradients are written in 16 bits, and copied in
# float32 for their reduction. No weight is stored twice: gradient, weight and moments read, weight and moments written.
TRANSFORMERS = KernelCounts(
    hidden_passes=54,
    feed_forward_passes=5,
    expert_passes=7,
    logit_bytes=14 / 3,
    head_again=1,
    gradient_bytes=8,
    update_bytes=28,
    dense_kernels=38,
    latent_kernels=24,
    expert_kernels=30,
)
# The same compiled in blocks: operations between matrix products and attention are one kernel. An estimate.
COMPILED_TRANSFORMERS = KernelCounts(
    hidden_passes=14,
    feed_forward_passes=3,
    expert_passes=4,
    logit_bytes=14 / 3,
    head_again=1,
    gradient_bytes=8,
    update_bytes=28,
    dense_kernels=14,
    latent_kernels=12,
    expert_kernels=24,
)


Parts = Mapping[str, float]  # seconds by bottleneck, one after the other

# Names in metrics.jsonl, and the predicted phases that each one measures.
PHASES: Mapping[str, tuple[str, ...]] = {
    "weight_sync": ("weight sync",),
    "rollout": ("rollout",),
    "reward_model": ("reward model",),
    "log_probs": ("log-probs", "reference", "values"),
    "update": ("update", "critic update"),
}
_MEASURED_AS = {phase: name for name, phases in PHASES.items() for phase in phases}

# Bottlenecks: keys of ``Parts``.
LIMITS = {
    "compute": "matrix products",
    "memory": "device memory",
    "node": "links in the node",
    "network": "network",
    "messages": "latency of collectives",
    "kernels": "starting kernels",
    "pipeline": "waiting for other stages",
    "cpu_memory": "CPU memory and the link to it",
}


@dataclass(frozen=True)
class MachineSpeed:
    """A GPU, the fractions of its figures that are reached, the job's ranks per node, and the kernels in training."""

    gpu: Gpu
    efficiency: EfficiencySection
    ranks_per_node: int
    kernels: KernelCounts = RLHPC

    @property
    def linked(self) -> int:
        """Number of neighbouring ranks that need no network between them."""
        return linked_ranks(self.ranks_per_node, self.gpu)

    @property
    def peak(self) -> float:
        """Operations per second of the data sheet."""
        return self.gpu.tflops * 1e12

    def calibrated(self, phase: str, parts: Parts) -> dict[str, float]:
        """Returns the parts of a predicted phase as long as a run measured them."""
        return times(parts, getattr(self.efficiency.phases, _MEASURED_AS[phase]))

    def compute(self, flops: float) -> float:
        return flops / (self.peak * self.efficiency.compute)

    def memory(self, size: float) -> float:
        """Returns the seconds for bytes read and written in GPU memory."""
        return size / (self.gpu.memory_gbps * 1e9 * self.efficiency.memory)

    def decode(self, size: float) -> float:
        """Returns the same in decoding."""
        return size / (self.gpu.memory_gbps * 1e9 * self.efficiency.decode)

    def to_cpu(self, size: float) -> float:
        """Returns the seconds for bytes between GPU and CPU memory, one way."""
        return size / (self.gpu.cpu_link_gbps * 1e9 * self.efficiency.cpu_memory)

    def cpu_memory(self, size: float) -> float:
        """Returns the seconds for bytes read and written in CPU memory by one rank's share of the cores."""
        return size / (self.gpu.cpu_memory_gbps * 1e9 * self.efficiency.cpu_memory)

    def ring(self, size: float, ranks: int, stride: int = 1, messages: float = 1) -> dict[str, float]:
        """Returns the seconds for ``size`` bytes from each of ``ranks``, ``stride`` apart, to its neighbour, in
        ``messages`` collectives."""
        if ranks == 1:
            return {}
        if ranks * stride <= self.linked:
            return {"node": size / self._node, "messages": messages * self._latency(ranks, 1)}
        inside = max(1, min(ranks, self.linked // stride))  # all their adapters carry the ring
        slowest = min(self._network * inside, self._node)
        return {"network": size / slowest, "messages": messages * self._latency(inside, -(-ranks // inside))}

    def exchange(self, size: float, ranks: int, stride: int = 1, messages: float = 1) -> dict[str, float]:
        """Returns the seconds for ``size`` bytes that each rank sends to all others in equal parts."""
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
    """One phase of a step on its slowest rank."""

    name: str
    parts: Parts
    flops: float = 0.0  # of the model, over all ranks
    sent: float = 0.0  # bytes that a rank sends to others
    notes: Mapping[str, float] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def limit(self) -> str:
        """Largest part: a key of LIMITS."""
        return max(self.parts, key=lambda part: self.parts[part], default="compute")


def total(*several: Parts) -> dict[str, float]:
    """Returns the sum by bottleneck."""
    return _sum((parts, 1.0) for parts in several)


def times(parts: Parts, count: float) -> dict[str, float]:
    """Returns the parts times ``count``."""
    return _sum([(parts, count)])


def _sum(weighted: Iterable[tuple[Parts, float]]) -> dict[str, float]:
    result: dict[str, float] = {}
    for parts, weight in weighted:
        for name, seconds in parts.items():
            result[name] = result.get(name, 0.0) + weight * seconds
    return result
