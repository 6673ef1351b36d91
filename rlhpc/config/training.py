"""Sections of models: parallel layout, optimizer, memory and experts, and the actor, the reference and the critic."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from rlhpc.config.section import (
    Fraction,
    ImportPath,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
    Share,
)


class ParallelSection(Section):
    """Parallel layout of training. Data parallelism takes the remaining ranks."""

    tp: PositiveInt = 1
    """Tensor parallel size."""
    pp: PositiveInt = 1
    """Pipeline parallel size."""
    vpp: PositiveInt | None = None
    """Virtual pipeline stages per pipeline rank: smaller bubbles, more messages. Needs pp > 1."""
    first_stage_layers: PositiveInt | None = None
    """Number of layers on the first pipeline rank; default: as on each rank between first and last."""
    last_stage_layers: PositiveInt | None = None
    """Number of layers on the last pipeline rank; default: as on each rank between first and last."""
    cp: PositiveInt = 1
    """Context parallel size: number of ranks that each sequence is split over."""
    cp_method: Literal["auto", "all_gather", "ulysses"] = "auto"
    """Exchange for attention over whole sequences: all keys and values (all_gather), or all tokens of some heads
    (ulysses, Jacobs et al. 2023). auto: ulysses with fsdp where cp divides the heads."""
    dp_replicate: PositiveInt = 1
    """Number of copies of the weights with train.backend fsdp, each sharded over the ranks of a copy (HSDP)."""
    ep: PositiveInt = 1
    """Expert parallel size: number of ranks that the experts of a layer are divided among."""
    etp: PositiveInt = 1
    """Tensor parallel size inside an expert."""
    expert_dispatch: Literal["alltoall", "allgather"] = "alltoall"
    """Token dispatch to experts: alltoall sends each token to its experts' ranks, allgather all tokens to all ranks."""
    sequence_parallel: bool = True
    """Sequence parallelism: activations split along the sequence between tensor-parallel regions, when tp > 1. Required
    then by experts and latent attention."""


class OptimizerSection(Section):
    """Optimizer by name, or your own by ``function``; no weight decay on vectors (norms and biases)."""

    name: Literal["adamw", "adamw8bit", "muon"] = "adamw"
    """AdamW (Loshchilov and Hutter 2019); with backend fsdp also adamw8bit, with moments in 8 bits by the package
    torchao, and muon (arXiv 2502.16982)."""
    learning_rate: PositiveFloat = 1e-6
    """Peak learning rate."""
    beta1: Fraction = 0.9
    """Decay rate of the first moment."""
    beta2: Fraction = 0.999
    """Decay rate of the second moment."""
    epsilon: PositiveFloat = 1e-8
    """Constant added to the root of the second moment."""
    weight_decay: NonNegativeFloat = 0.01
    """Decoupled weight decay, scaled by the learning rate."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """Decay rate of Muon's momentum."""
    nesterov: bool = True
    """Nesterov momentum in Muon."""
    ns_steps: PositiveInt = 5
    """Number of Newton-Schulz steps that orthogonalize an update of Muon."""
    max_grad_norm: PositiveFloat = 1.0
    """Maximum global gradient norm; larger gradients are scaled down to it."""
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    """Learning-rate schedule after the warm-up, down towards final_fraction of the peak after the last step."""
    warmup_steps: NonNegativeInt = 0
    """Number of steps of linear warm-up, among those that train the model."""
    final_fraction: Share = 0.0
    """Final learning rate as a fraction of the peak; see schedule."""
    optimizer_offload_fraction: Share = 0.0
    """Fraction of the parameters whose moments and master weights are in CPU memory and updated there; AdamW only."""
    function: ImportPath | None = None
    """Import path of your own optimizer, called as function(param_groups, **arguments); see docs/optimizer.md."""
    arguments: dict[str, Any] = {}
    """Keyword arguments of the function; beta1, beta2 and epsilon are AdamW's and not passed on."""


class CriticMoeSection(Section):
    """Mixture-of-experts models; no effect on others."""

    aux_loss: NonNegativeFloat = 0.0
    """Weight of the load-balancing loss (Fedus et al. 2022, section 2.2); 0: routers learn from the objective alone."""
    bias_update_rate: NonNegativeFloat = 0.0
    """Step size of each expert's bias towards equal load per update, in models that have one; 0: frozen."""
    router_dtype: Literal["engine", "float32"] = "engine"
    """Data type of router logits: that of vLLM's kernels for the family, so that trainer and engine choose the same
    experts; or float32."""


class MoeSection(CriticMoeSection):
    """Mixture-of-experts models; no effect on others."""

    router_replay: bool = False
    """Router replay (arXiv 2510.11370): each token trains on the experts that it was routed to in the engine."""


class OffloadSection(Section):
    """State moved to CPU memory while unused. It returns automatically before use."""

    parameters: bool = False
    """Offload of the weights while the engine generates."""
    gradients: bool = False
    """Release of gradient buffers between updates; their content is discarded."""
    optimizer: bool = False
    """Offload of master weights and moments between updates."""
    fraction: Share = 1.0
    """Minimum fraction of the selected bytes to offload, in whole buffers: gradients, then optimizer, then weights."""


class MemorySection(Section):
    """Memory savings in training, in both phases; see docs/planning.md."""

    recompute: Literal["none", "selective", "full"] = "none"
    """Activation recomputation in the backward pass: of recompute_modules (selective), or of all layers (full)."""
    recompute_modules: list[Literal["core_attn", "mlp", "moe", "shared_experts"]] = ["core_attn", "mlp", "moe"]
    """Modules recomputed with selective, where the model has them: core attention, dense feed-forward, expert layers,
    shared experts."""
    recompute_layers: PositiveInt = 1
    """Number of layers per recomputed group with full; only the input of each group's first layer is stored."""
    offload_activations: bool = False
    """Offload of the inputs of recomputed groups to CPU memory until their backward pass, with recompute: full."""
    reshard_after_forward: bool = True
    """Release of a layer's gathered weights after its forward pass, with train.backend fsdp; false: they stay until its
    backward pass."""
    accumulation: Literal["auto", "reduce", "keep"] = "auto"
    """Sum over ranks of gradients with backend fsdp: after each microbatch (reduce), or after the last (keep). auto:
    keep where the planner finds memory."""
    cpu_offload: bool = False
    """Shards, gradients and optimizer in CPU memory at all times, with train.backend fsdp."""
    offload: OffloadSection = OffloadSection()


class FrozenMemorySection(Section):
    """Memory savings of a model that is not trained."""

    offload: bool = False
    """Offload of the weights to CPU memory except while the model computes."""


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


class CriticOptimizerSection(OptimizerSection):
    learning_rate: PositiveFloat = 1e-5
    """Peak learning rate."""


class CriticSection(Section):
    """Value model of ppo; other algorithms have none."""

    on: Literal["trainers", "judges"] = "trainers"
    """Ranks that have it: those that train, or judges (their own), which need placement separate or lend."""
    path: Path | None = None
    """Path to another model with the same vocabulary, such as a reward model; default: the actor's weights at the start
    of RL."""
    parallel: ParallelSection | None = None
    """Parallel layout; default: the actor's."""
    optimizer: CriticOptimizerSection = CriticOptimizerSection()
    memory: MemorySection | None = None
    """Memory savings; default: the actor's, on judges without its offload."""
    moe: CriticMoeSection | None = None
    """Mixture-of-experts settings; default: the actor's, without router replay."""
    tokens_per_microbatch: PositiveInt | None = None
    """Maximum tokens per rank in one forward and backward pass; default: train.tokens_per_microbatch."""
    warmup_steps: NonNegativeInt = 0
    """Number of first RL steps in which only the critic is trained."""
    value_clip: PositiveFloat | None = 0.5
    """Clip range of a value around its value before the step's updates (Schulman et al. 2017, as in their code); null:
    no clipping."""
