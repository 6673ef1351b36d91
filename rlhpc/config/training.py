"""Sections of a model: parallel layout, optimizer, memory, mixture of experts."""

from __future__ import annotations

from typing import Any, Literal

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
    cp_method: Literal["all_gather", "ulysses"] = "all_gather"
    """Exchange for attention over whole sequences: all_gather gives each rank all keys and values; ulysses gives it all
    tokens of some heads (Jacobs et al. 2023), and cp must divide the heads of a tensor-parallel rank."""
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
    """AdamW (Loshchilov and Hutter 2019) unless ``function`` is set; no weight decay on vectors (norms and biases)."""

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
    """Memory savings in training, in both phases; see docs/memory.md."""

    recompute: Literal["none", "selective", "full"] = "none"
    """Activation recomputation in the backward pass: of recompute_modules (selective), or of all layers (full)."""
    recompute_modules: list[Literal["core_attn", "mlp", "moe", "shared_experts"]] = ["core_attn", "mlp", "moe"]
    """Modules recomputed with selective, where the model has them: core attention, dense feed-forward, expert layers,
    shared experts."""
    recompute_layers: PositiveInt = 1
    """Number of layers per recomputed group with full; only the input of each group's first layer is stored."""
    offload: OffloadSection = OffloadSection()


class FrozenMemorySection(Section):
    """Memory savings of a model that is not trained."""

    offload: bool = False
    """Offload of the weights to CPU memory except while the model computes."""
