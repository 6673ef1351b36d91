"""Sections of whatever is trained: how it is cut, its optimizer, its experts, its memory."""

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
    """How the training side is cut. Data parallelism takes the ranks that are left."""

    tp: PositiveInt = 1
    """Tensor parallel size."""
    pp: PositiveInt = 1
    """Pipeline parallel size."""
    vpp: PositiveInt | None = None
    """Virtual pipeline stages on each pipeline rank: shorter pauses at the price of more messages. Needs pp > 1."""
    first_stage_layers: PositiveInt | None = None
    """Layers on the first pipeline rank; default: as many as on each rank between first and last."""
    last_stage_layers: PositiveInt | None = None
    """Layers on the last pipeline rank; default: as many as on each rank between first and last."""
    cp: PositiveInt = 1
    """Context parallel size: each sequence is cut over so many ranks."""
    cp_method: Literal["all_gather", "ulysses"] = "all_gather"
    """How those ranks come to attend to whole sequences: all_gather gives each one all keys and values, ulysses gives
    it all tokens of some heads (Jacobs et al. 2023) and needs the heads of a tensor-parallel rank to divide by cp."""
    ep: PositiveInt = 1
    """Expert parallel size: the experts of a layer are divided among so many ranks."""
    etp: PositiveInt = 1
    """Tensor parallel size inside an expert."""
    expert_dispatch: Literal["alltoall", "allgather"] = "alltoall"
    """How tokens reach the ranks of their experts: each to its own, or all to all of them."""
    sequence_parallel: bool = True
    """Cut activations along the sequence between tensor-parallel regions; used when tp > 1. Experts and latent
    attention need it then."""


class OptimizerSection(Section):
    """AdamW (Loshchilov and Hutter 2019) unless ``function`` says otherwise; no decay on vectors (norms and biases)."""

    learning_rate: PositiveFloat = 1e-6
    """Highest rate of the schedule."""
    beta1: Fraction = 0.9
    """Decay of the gradient's running mean."""
    beta2: Fraction = 0.999
    """Decay of the running mean of the gradient's square."""
    epsilon: PositiveFloat = 1e-8
    """Added to the root of that mean."""
    weight_decay: NonNegativeFloat = 0.01
    """Decoupled, scaled by the learning rate."""
    max_grad_norm: PositiveFloat = 1.0
    """Bound on the global gradient norm."""
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    """Shape after the warm-up, down to final_fraction of the rate at the last step."""
    warmup_steps: NonNegativeInt = 0
    """Steps in which the rate rises linearly."""
    final_fraction: Share = 0.0
    """See schedule."""
    optimizer_offload_fraction: Share = 0.0
    """AdamW only: this share of the parameters has moments and master weights in host memory; the CPU updates it."""
    function: ImportPath | None = None
    """Your own in place of AdamW, called as function(param_groups, **arguments); see docs/optimizer.md."""
    arguments: dict[str, Any] = {}
    """Keyword arguments of the function; beta1, beta2 and epsilon are AdamW's own and not passed on."""


class ExpertsSection(Section):
    """Mixture-of-experts models; no effect on others."""

    aux_loss: NonNegativeFloat = 0.0
    """Weight of the load-balancing loss (Fedus et al. 2022, section 2.2); 0: routers learn from the objective alone."""
    bias_update_rate: NonNegativeFloat = 0.0
    """By how much an update moves each expert's bias towards equal load, in models that have one; 0: it is frozen."""
    router_dtype: Literal["engine", "float32"] = "engine"
    """Precision of the routers' logits: that of vLLM's kernels for the model family, so that trainer and engine choose
    the same experts, or float32."""
    router_replay: bool = False
    """Send each token to the experts that it went to when it was generated (routing replay, arXiv 2510.11370)."""


class OffloadSection(Section):
    """What leaves the training device while it is not needed. It comes back by itself before it is used."""

    parameters: bool = False
    """The actor's weights, while the engine generates."""
    gradients: bool = False
    """Gradient buffers, outside of updates: freed, their content is not kept."""
    optimizer: bool = False
    """Master weights and moments, outside of updates."""
    reference: bool = False
    """The frozen reference model, except while it computes."""
    fraction: Share = 1.0
    """At least this share of the chosen bytes, in whole buffers: gradients first, then optimizer, then weights."""


class MemorySection(Section):
    """How training is made to fit into the device's memory, in both phases; see docs/memory.md."""

    recompute: Literal["none", "selective", "full"] = "none"
    """Activations not kept for the backward pass but computed again: of recompute_modules, or of all layers."""
    recompute_modules: list[Literal["core_attn", "mlp", "moe", "shared_experts"]] = ["core_attn", "mlp", "moe"]
    """With selective, of those that the model has: attention without its projections, dense feed-forward, expert
    layers, shared experts."""
    recompute_layers: PositiveInt = 1
    """With full: layers of which only the first one's input is kept."""
    offload: OffloadSection = OffloadSection()
