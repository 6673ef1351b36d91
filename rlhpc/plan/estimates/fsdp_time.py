"""Seconds of forward passes and updates on FSDP2.

All ranks compute whole layers. While one computes, the weights of the next are gathered; the gradients of one are
reduced while the next is differentiated. What of both takes longer is waited for.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from rlhpc.config.schema import RunConfig
from rlhpc.config.training import MemorySection, OptimizerSection, ParallelSection
from rlhpc.models import ModelDescription
from rlhpc.plan.estimates.fsdp_memory import layout_sizes
from rlhpc.plan.estimates.fsdp_parameters import ParameterGroups, parameter_groups
from rlhpc.plan.estimates.rank_memory import ITEMSIZE
from rlhpc.plan.estimates.roofline import (
    COMPILED_TRANSFORMERS,
    RLHPC,
    TRANSFORMERS,
    MachineSpeed,
    Parts,
    PhaseTime,
    times,
    total,
)
from rlhpc.plan.estimates.train_time import (
    Training,
    backward_times,
    model_flops,
    only_backward,
    rank_microbatches,
    stage_times,
)
from rlhpc.plan.estimates.workload import StepWorkload
from rlhpc.sharding.layout import ParallelLayout, choose_context_method
from rlhpc.sharding.mesh_sizes import MeshSizes
from rlhpc.sharding.placement import backend_for

_NO_TIME: Parts = {}
_FLOAT32 = 4
_STATE = 8  # bytes of both moments of a parameter
_COPIES = 2  # a gathered weight is read from a buffer and written to its parameter


def make_training(
    config: RunConfig, shape: ModelDescription, layout: ParallelLayout, parallel: ParallelSection, machine: MachineSpeed
) -> Training:
    """Returns a model of the run under a layout, on its back end."""
    itemsize = ITEMSIZE[config.model.dtype]
    if backend_for(config, shape) != "fsdp":
        return Training(shape, layout, parallel, machine, itemsize)
    if machine.kernels is RLHPC:
        own = COMPILED_TRANSFORMERS if config.train.compile == "blocks" else TRANSFORMERS
        machine = replace(machine, kernels=own)
    return FsdpTraining(shape, layout, parallel, machine, itemsize)


@dataclass(frozen=True)
class FsdpTraining(Training):
    """A model on FSDP2. Shards are in float32."""

    @cached_property
    def sizes(self) -> MeshSizes:
        return layout_sizes(self.parallel, self.layout)

    @cached_property
    def groups(self) -> ParameterGroups:
        return parameter_groups(self.shape)

    @property
    def cp_method(self) -> str:
        kv_heads = self.shape.num_kv_heads if self.shape.latent is None else self.shape.num_heads
        requested = None if self.parallel.cp_method == "auto" else self.parallel.cp_method
        return choose_context_method(self.shape.num_heads, kv_heads, self.layout.cp, requested).method

    @property
    def shards(self) -> int:
        return self.sizes.shards

    @property
    def weight_bytes(self) -> float:
        return float(_FLOAT32 * self.groups.shard(self.shards))

    @property
    def frozen_bytes(self) -> float:
        return float(self.itemsize * self.groups.shard(self.shards))

    @property
    def optimizer_bytes(self) -> float:
        return float(_STATE * self.groups.shard(self.shards))

    def pass_time(self, work: StepWorkload, tokens: int, name: str) -> PhaseTime:
        """Returns the time of one forward pass without gradients over a step's samples."""
        count, size = rank_microbatches(self, work, work.samples, tokens)
        one = self._forward(size, work.pairs)
        return PhaseTime(
            name,
            self.machine.calibrated(name, times(one, count)),
            model_flops(self, work),
            count * self._gathered_bytes,
            {"microbatches": count},
        )

    def update_time(
        self, work: StepWorkload, tokens: int, optimizer: OptimizerSection, memory: MemorySection, name: str
    ) -> PhaseTime:
        """Returns the time of all of a step's updates; a microbatch has at most ``tokens`` tokens on each rank."""
        count, size = rank_microbatches(self, work, work.samples * work.epochs / work.updates, tokens)
        keeps = memory.accumulation == "keep"
        forward = self._forward(size, work.pairs, self._copied if memory.cpu_offload else {})
        (again,) = stage_times(self, size, work.pairs, recompute=memory)
        (plain,) = stage_times(self, size, work.pairs)
        (more,) = only_backward(self, size, work.pairs)
        backward = total(backward_times(plain), more, again)
        if memory.reshard_after_forward:
            backward = total(backward, self._copying)
        copied = self._copied if memory.cpu_offload else {}
        gather = total(self._gather, copied) if memory.reshard_after_forward else {}
        kept = times(_overlapped(backward, gather), count - 1)
        reduced = total(gather, self._scatter, copied)
        last = _overlapped(backward, total(reduced, self._all_reduce))
        if not keeps:
            kept = times(_overlapped(backward, reduced), count - 1)
        elif count > 1:
            kept = total(kept, {"memory": self.machine.memory(2 * _FLOAT32 * self.groups.numel * (count - 1))})
        one = total(times(forward, count), kept, last, self._optimizer(on_cpu=memory.cpu_offload))
        sent = count * self._gathered_bytes * (1 + memory.reshard_after_forward)
        sent += (1 if keeps else count) * _FLOAT32 / self.itemsize * self._gathered_bytes
        flops = 3 * model_flops(self, work) * work.epochs
        parts = self.machine.calibrated(name, times(one, work.updates))
        return PhaseTime(name, parts, flops, work.updates * sent, {"microbatches": count})

    def _forward(self, tokens: float, pairs: float, copied: Parts = _NO_TIME) -> dict[str, float]:
        """Returns the seconds of a microbatch; nothing computes while root and first layer are gathered. ``copied``: of
        shards from CPU memory."""
        (computing,) = stage_times(self, tokens, pairs)
        share = self.groups.largest_layer(1).numel + self.groups.root.numel + self.groups.embedding.numel
        gather = total(self._gather, copied)
        first = times(gather, min(1.0, share / self.groups.numel))
        return total(_overlapped(total(computing, self._copying), gather), first)

    @property
    def _gathered_bytes(self) -> float:
        """Bytes that a rank sends while all weights are gathered once."""
        shards = self.shards
        return self.itemsize * (shards - 1) * self.groups.shard(shards)

    @property
    def _messages(self) -> int:
        return self.groups.num_layers + 3 - self.groups.tied

    @property
    def _gather(self) -> dict[str, float]:
        """Returns the seconds of the all-gathers of all weights."""
        return self.machine.ring(self._gathered_bytes, self.shards, 1, messages=self._messages)

    @property
    def _copying(self) -> dict[str, float]:
        size = _COPIES * self.itemsize * self.groups.gathered(self.shards)
        return {"memory": self.machine.memory(size)}

    @property
    def _scatter(self) -> dict[str, float]:
        """Returns the seconds of the reduce-scatters of all gradients, in float32."""
        size = self._gathered_bytes * _FLOAT32 / self.itemsize
        return self.machine.ring(size, self.shards, 1, messages=self._messages)

    @property
    def _all_reduce(self) -> dict[str, float]:
        """Returns the seconds in which copies of the weights sum their gradients, once an update."""
        copies, shards = self.sizes.dp_replicate, self.shards
        size = 2 * (copies - 1) / copies * _FLOAT32 * self.groups.shard(shards)
        return self.machine.ring(size, copies, shards, messages=self._messages)

    @property
    def _copied(self) -> dict[str, float]:
        """Returns the seconds in which shards are copied from CPU memory, or gradients to it: both are in float32."""
        return {"cpu_memory": self.machine.to_cpu(_FLOAT32 * self.groups.shard(self.shards))}

    def _optimizer(self, *, on_cpu: bool) -> dict[str, float]:
        moved = self.machine.kernels.update_bytes * self.groups.shard(self.shards)
        return {"cpu_memory": self.machine.cpu_memory(moved)} if on_cpu else {"memory": self.machine.memory(moved)}


def _overlapped(computing: Parts, moving: Parts) -> dict[str, float]:
    """Returns both, of what is moved only what takes longer than computing."""
    seconds = sum(moving.values())
    hidden = min(1.0, sum(computing.values()) / seconds) if seconds else 1.0
    return total(computing, times(moving, 1 - hidden))
