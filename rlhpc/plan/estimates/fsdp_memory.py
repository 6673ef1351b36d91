"""Memory of one model on one rank of the FSDP2 back end: shards, gradients, optimizer, gathered weights, activations.

Root, head and a layer at a time are gathered in the model's dtype; a layer's gradients exist whole until they are
reduced, in float32. With ``cpu_offload`` shards, gradients and optimizer are in CPU memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from rlhpc.config.schema import RunConfig
from rlhpc.config.training import MemorySection, ParallelSection
from rlhpc.models import ModelDescription
from rlhpc.plan.estimates.fsdp_activations import (
    FsdpSetting,
    StoredBytes,
    backward_peak,
    forward_peak,
    head_peak,
    stored_activations,
)
from rlhpc.plan.estimates.fsdp_parameters import (
    ParameterGroups,
    fsdp_state,
    gathered_bytes,
    parameter_groups,
    pinned_gradients,
)
from rlhpc.plan.estimates.rank_memory import RankModel, StateBytes, Tokens
from rlhpc.sharding.layout import ParallelLayout
from rlhpc.sharding.mesh_sizes import MeshSizes, mesh_layout
from rlhpc.sharding.placement import backend_for

Accumulation = Literal["reduce", "keep"]
_FLOAT32 = 4
# Layers gathered at once: the one that computes, the next one, and the buffer that one of both is copied from
# (torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py, foreach_all_gather_copy_out).
_GATHERED_LAYERS = 3


def layout_sizes(parallel: ParallelSection, layout: ParallelLayout) -> MeshSizes:
    """Returns the sizes of the mesh of a layout, which has no copies of the weights of its own."""
    shards = layout.world_size // parallel.dp_replicate
    return MeshSizes(parallel.dp_replicate, shards // layout.cp, layout.cp)


@dataclass(frozen=True)
class FsdpModel(RankModel):
    """One model on one rank."""

    name: str
    setting: FsdpSetting
    groups: ParameterGroups
    sizes: MeshSizes
    rank: int
    state: StateBytes  # without gradients, which an update frees
    gradients: int
    tokens: Tokens
    trained: bool

    @property
    def layout(self) -> ParallelLayout:
        return mesh_layout(self.sizes)

    @property
    def memory(self) -> MemorySection:
        return self.setting.memory

    @property
    def updating_state(self) -> StateBytes:
        return replace(self.state, gradients=self.gradients)

    @property
    def pass_parts(self) -> dict[str, int]:
        setting, tokens = self.setting, self.tokens.passed
        head = head_peak(setting.shape, setting.itemsize, tokens, backward=False)
        return {"activations": max(forward_peak(setting, tokens), head), "gathered weights": self._gathered}

    @property
    def update_parts(self) -> dict[str, int]:
        stored = self.stored
        return {
            "activations": stored.total,
            "gathered weights": self._gathered,
            "unreduced gradients": self.unreduced,
            "workspace": self._workspace(stored),
        }

    @property
    def stored(self) -> StoredBytes:
        return stored_activations(self.setting, self.tokens.trained)

    @property
    def activations_on_cpu(self) -> int:
        return self.stored.away if self.trained else 0

    @property
    def unreduced(self) -> int:
        """Bytes of gradients on the GPU that wait for the last microbatch: whole ones, beyond those of the reduced ones
        that replace them, or with shards in CPU memory those that copies of the weights have yet to sum."""
        if self.tokens.microbatches == 1:
            return 0
        if self.memory.accumulation == "keep":
            return max(0, _FLOAT32 * self.groups.numel - self.gradients)
        waits = self.memory.cpu_offload and self.sizes.dp_replicate > 1
        return _FLOAT32 * self.groups.shard(self.sizes.shards) if waits else 0

    @property
    def weights(self) -> int:
        itemsize = _FLOAT32 if self.trained else self.setting.itemsize
        return itemsize * self.groups.shard(self.sizes.shards)

    @property
    def saved_on_cpu(self) -> int:
        return self.state.parameters + self.state.optimizer + self.state.cpu

    @cached_property
    def _layer(self) -> int:
        """Elements of the largest layer, gathered."""
        shards = self.sizes.shards
        return self.groups.largest_layer(shards).gathered(shards)

    @property
    def _gathered(self) -> int:
        """Bytes of weights that are gathered while a layer computes, with shards on their way from CPU memory."""
        groups, shards, e = self.groups, self.sizes.shards, self.setting.itemsize
        whole = gathered_bytes([groups.root, groups.head], shards, e)
        if self.memory.cpu_offload:
            whole += (_FLOAT32 + e) * self._layer // shards
        if self.memory.reshard_after_forward or not self.trained:
            return whole + min(_GATHERED_LAYERS, groups.num_layers + 1) * e * self._layer
        return whole + gathered_bytes([*groups.layers, groups.embedding], shards, e) + e * self._layer

    def _workspace(self, stored: StoredBytes) -> int:
        """Temporary bytes of a backward pass, at the head, at the last layer, or at the embedding after all layers."""
        groups, shards, e = self.groups, self.sizes.shards, self.setting.itemsize
        tokens, layer = self.tokens.trained, self._layer
        own = groups.root if groups.tied else groups.head
        gradient, reduced = e * own.numel, _FLOAT32 * own.gathered(shards)
        log_probs = head_peak(self.setting.shape, e, tokens, backward=True)
        at_head = gradient + (log_probs if groups.tied else max(log_probs, reduced))
        # What is reduced is freed when the next module's gradients are.
        before = gradient if groups.tied else reduced
        passes = max(backward_peak(self.setting, tokens), _FLOAT32 * layer)
        at_layer = before + e * layer + stored.recomputed + passes
        last = groups.root if groups.tied else groups.embedding
        at_end = (e + _FLOAT32) * last.gathered(shards) + _FLOAT32 * layer - stored.layers
        return max(at_head, at_layer, at_end)


def make_fsdp_model(
    name: str, setting: FsdpSetting, sizes: MeshSizes, rank: int, tokens: Tokens, optimizer: str | None
) -> FsdpModel:
    """Returns the model on a rank. ``optimizer``: its name, None for a frozen model."""
    groups, trained = parameter_groups(setting.shape), optimizer is not None
    state = fsdp_state(groups, sizes, rank, setting.dtype, optimizer)
    gradients, state = state.gradients, replace(state, gradients=0)
    if setting.memory.cpu_offload:
        kept = pinned_gradients(groups, sizes, rank) if trained else 0
        gradients, state = 0, StateBytes(0, cpu=state.parameters + state.optimizer, staging=kept)
    return FsdpModel(name, setting, groups, sizes, rank, state, gradients, tokens, trained=trained)


def with_accumulation(config: RunConfig, choice: Accumulation) -> RunConfig:
    """Returns the config with ``choice`` in place of auto, for the actor and a critic with settings of its own."""

    def replaced(memory: MemorySection) -> MemorySection:
        return memory.model_copy(update={"accumulation": choice}) if memory.accumulation == "auto" else memory

    actor, critic = config.actor, config.critic
    actor = actor.model_copy(update={"memory": replaced(actor.memory)})
    if critic.memory is not None:
        critic = critic.model_copy(update={"memory": replaced(critic.memory)})
    return config.model_copy(update={"actor": actor, "critic": critic})


def resolve_accumulation(config: RunConfig, shape: ModelDescription, fits: Callable[[RunConfig], bool]) -> RunConfig:
    """Returns the config without ``accumulation: auto``: keep where it ``fits``, else reduce."""
    if backend_for(config, shape) != "fsdp":
        return config
    kept = with_accumulation(config, "keep")
    if kept == config:
        return config
    return kept if fits(kept) else with_accumulation(config, "reduce")
