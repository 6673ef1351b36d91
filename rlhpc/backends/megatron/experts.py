"""Router and experts of Megatron's MoE layer, and the weights of a token's experts.

The mathematics of routing is that of Megatron's TopKRouter (moe_utils.py, ``topk_routing_with_score_function``), which
makes maps [tokens, experts]; here weights are values of the tokens' choices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from jaxtyping import Bool, Float, Float32, Int16, Int64
from megatron.core import parallel_state
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_utils import (
    MoEAuxLossAutoScaler,
    compute_routing_scores_for_aux_loss,
    get_tokens_per_expert_and_token_count,
    group_limited_topk,
    switch_load_balancing_loss_func,
)
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from rlhpc.backends.kernels.choices import SortedChoices, sort_choices
from rlhpc.backends.kernels.compiled import compiled
from rlhpc.backends.kernels.expert_mlp import expert_mlp
from rlhpc.parallel.compat import device

# softmax over all experts; over the selected ones; sigmoid, divided by the sum over the selected ones, or as it is
WeightRule = Literal["softmax", "selected_softmax", "selected_sigmoid", "sigmoid"]


@dataclass(frozen=True)
class Routing:
    """The experts of T tokens, their weights, and the order of the tokens by expert."""

    experts: Int64[Tensor, "T k"]
    weights: Float32[Tensor, "T k"]
    choices: SortedChoices


def weight_rule(config: TransformerConfig) -> WeightRule:
    """Rule by which the configuration's weights follow from logits."""
    if config.moe_router_score_function == "softmax":
        return "softmax" if config.moe_router_pre_softmax else "selected_softmax"
    return "selected_sigmoid" if config.moe_router_topk > 1 else "sigmoid"


def choose_experts(
    logits: Float[Tensor, "T experts"],
    config: TransformerConfig,
    bias: Float32[Tensor, " experts"] | None,
    given: Int16[Tensor, "T k"],
) -> Int64[Tensor, "T k"]:
    """Experts with the largest scores, with the bias, in the kept groups.

    ``given``: experts of router replay, from 1; tokens with 0, and padding with -1, choose for themselves.
    """
    scores = logits.detach().float()
    if config.moe_router_score_function == "sigmoid":
        scores = scores.sigmoid()
    elif config.moe_router_pre_softmax:
        scores = scores.softmax(-1)
    if bias is not None:
        scores = scores + bias
    k, (tokens, experts) = config.moe_router_topk, scores.shape
    if config.moe_router_group_topk:
        groups, kept = config.moe_router_num_groups, config.moe_router_group_topk
        own = group_limited_topk(scores, k, tokens, experts, groups, kept)[1]
    else:
        own = scores.topk(k, dim=1).indices
    return _given_or_own(given, own)


@compiled
def _given_or_own(given: Tensor, own: Tensor) -> Tensor:
    return torch.where(given[:, :1] > 0, given.long() - 1, own)


def route_weights(
    logits: Float[Tensor, "T experts"], experts: Int64[Tensor, "T k"], rule: WeightRule, scale: float
) -> Float32[Tensor, "T k"]:
    """Weights of the selected experts, with a gradient for the logits."""
    return _RouteWeights.apply(logits, experts, rule, scale)


class _RouteWeights(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, experts: Tensor, rule: WeightRule, scale: float) -> Tensor:
        ctx.save_for_backward(logits, experts)
        ctx.rule, ctx.scale = rule, scale
        return _weights(logits, experts, rule, scale)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _weights_backward(*ctx.saved_tensors, gradient, ctx.rule, ctx.scale), None, None, None


@compiled
def _weights(logits: Tensor, experts: Tensor, rule: WeightRule, scale: float) -> Tensor:
    if rule == "softmax":
        return logits.float().softmax(-1).gather(1, experts) * scale
    selected = logits.gather(1, experts).float()
    if rule == "selected_softmax":
        return selected.softmax(-1) * scale
    selected = selected.sigmoid()
    if rule == "selected_sigmoid":
        selected = selected / (selected.sum(-1, keepdim=True) + 1e-20)
    return selected * scale


@compiled
def _weights_backward(logits: Tensor, experts: Tensor, gradient: Tensor, rule: WeightRule, scale: float) -> Tensor:
    gradient = gradient * scale
    if rule == "softmax":
        scores = logits.float().softmax(-1)
        mean = (gradient * scores.gather(1, experts)).sum(-1, keepdim=True)
        spread = torch.zeros_like(scores).scatter(1, experts, gradient)
        return (scores * (spread - mean)).to(logits.dtype)
    selected = logits.gather(1, experts).float()
    if rule == "selected_softmax":
        scores = selected.softmax(-1)
        of_selected = scores * (gradient - (gradient * scores).sum(-1, keepdim=True))
    else:
        scores = selected.sigmoid()
        if rule == "selected_sigmoid":
            total = scores.sum(-1, keepdim=True) + 1e-20
            gradient = (gradient - (gradient * scores).sum(-1, keepdim=True) / total) / total
        of_selected = gradient * scores * (1 - scores)
    # A token's experts differ, so that no two values meet.
    return torch.zeros_like(logits).scatter(1, experts, of_selected.to(logits.dtype))


@compiled
def count_routes(
    logits: Float[Tensor, "T experts"],
    experts: Int64[Tensor, "T k"],
    counted: Bool[Tensor, " T"],
    counts: Float32[Tensor, " experts+2"],
    rule: WeightRule,
) -> Float32[Tensor, " experts"]:
    """Adds tokens of each expert, the sum of the tokens' entropies and their number to the counts; returns the first.

    ``counted``: false for padding, which adds 0. Entropies are of a token's distribution over all experts.
    """
    scores = logits.float()
    if rule in ("sigmoid", "selected_sigmoid"):
        scores = scores.sigmoid().log()
    log_probs = scores.log_softmax(-1)
    ones = counted[:, None].expand(experts.shape).float()
    sizes = torch.zeros_like(counts[:-2]).scatter_add(0, experts.flatten(), ones.flatten())
    entropy = -((log_probs.exp() * log_probs).sum(-1) * counted).sum()
    counts += torch.cat([sizes, entropy[None], counted.sum()[None]])
    return sizes


class Router(TopKRouter):
    """Megatron's router, whose routes are values of each token's choices. Its gate is plain PyTorch: upstream's calls
    Transformer Engine (moe_utils.py:1192).

    Counts its decisions while gradients are enabled, for the metrics of an update; a recomputed forward counts once.
    """

    def __init__(self, config: TransformerConfig, pg_collection: Any = None) -> None:
        super().__init__(config=config, pg_collection=pg_collection)
        self.aux_weight = 0.0  # 1 / tokens of the whole batch, set before each update
        # On this rank since the last reset: tokens of each expert, sum of the tokens' entropies, tokens.
        self.counts = torch.zeros(config.num_moe_experts + 2, device=device())
        self._numbers = torch.arange(config.num_moe_experts, device=device())

    def _apply(self, fn: Callable[[Tensor], Tensor], *args: Any) -> Router:
        """Casts parameters, and leaves the bias per expert and its counts unchanged, in float32.

        Float16Module would replace them by bfloat16 copies (module.py, ``convert_module``): weights are loaded into the
        original tensors, and counts above 256 would be rounded.
        """
        before = dict(self._buffers)
        super()._apply(fn, *args)
        for name, buffer in before.items():
            if buffer is not None:
                self._buffers[name] = buffer.to(self._buffers[name].device)
        return self

    def gating(self, input: Float[Tensor, "*tokens hidden"]) -> Float[Tensor, "*tokens experts"]:
        """Logits as vLLM computes them: a product rounded to the model's dtype, which its top-k kernels cast to
        float32. In bfloat16 that rounding decides between experts with nearly equal logits."""
        dtype = torch.float32 if self.config.moe_router_dtype == "fp32" else input.dtype
        return F.linear(input.to(dtype), self.weight.to(dtype))

    def forward(self, input: Float[Tensor, "T hidden"], given: Int16[Tensor, "T topk"]) -> Routing:
        """Routing of the tokens; ``given``: a layer's part of ``RoutedExperts``."""
        return self.route(self.gating(input), given)

    def route(self, logits: Float[Tensor, "T experts"], given: Int16[Tensor, "T topk"]) -> Routing:
        """Routing by the logits. Padding is routed too, and adds nothing to the auxiliary loss or the counts."""
        experts = choose_experts(logits, self.config, self.expert_bias, given)
        choices = sort_choices(experts, self._numbers)
        rule, scale = weight_rule(self.config), self.config.moe_router_topk_scaling_factor or 1.0
        weights = route_weights(logits, experts, rule, scale)
        if torch.is_grad_enabled():
            padding = given[:, 0] < 0
            if self.training and self.is_aux_loss_enabled():
                weights = self._with_aux_loss(weights, logits.float(), padding)
            with torch.no_grad():
                sizes = count_routes(logits.detach(), experts, ~padding, self.counts, rule)
                if self.enable_expert_bias:
                    self.local_tokens_per_expert += sizes
        return Routing(experts, weights, choices)

    def _with_aux_loss(
        self, weights: Float32[Tensor, "T k"], logits: Float32[Tensor, "T experts"], padding: Bool[Tensor, " T"]
    ) -> Float32[Tensor, "T k"]:
        """The weights, whose backward pass adds that of the auxiliary loss: the mean of the microbatches' by tokens.

        Upstream weighs microbatches equally and divides by tokens that may be none (router.py, ``_apply_aux_loss``).
        """
        map, scores = compute_routing_scores_for_aux_loss(logits, self.topk, self.score_function, padding_mask=padding)
        group = self.tp_cp_group
        load, _, tokens = get_tokens_per_expert_and_token_count(map, group, self.topk, with_padding_mask=True)
        options = {"moe_aux_loss_coeff": self.config.moe_aux_loss_coeff, "num_experts": logits.size(1)}
        own = switch_load_balancing_loss_func(scores, load, tokens.clamp(min=1), self.topk, **options)
        return MoEAuxLossAutoScaler.apply(weights, own * tokens * self.aux_weight)


def routers_of(models: Sequence[torch.nn.Module]) -> list[Router]:
    """Routers of this rank's modules, in order of layers."""
    return [module for model in models for module in model.modules() if isinstance(module, Router)]


def biases_of(routers: Sequence[Router]) -> list[Tensor]:
    """Copies of the per-expert biases of the routers that have one."""
    return [router.expert_bias.clone() for router in routers if router.expert_bias is not None]


def restore_biases(routers: Sequence[Router], biases: Sequence[Tensor]) -> None:
    """Restores the copies after a skipped update: Megatron updates the biases when it reduces the gradients
    (finalize_model_grads.py:476), before their norm is known."""
    with_bias = [router for router in routers if router.expert_bias is not None]
    for router, bias in zip(with_bias, biases, strict=True):
        router.expert_bias.copy_(bias)


def routing_metrics(routers: Sequence[Router], top_k: int) -> dict[str, float]:
    """Statistics of the routers' counts, over all ranks and layers; equal on every rank. Collective.

    load_max: tokens of the busiest expert over the mean, in the worst layer; idle: share of experts without tokens;
    dropped: share of token-expert assignments that no expert processed; entropy: of a token's distribution over
    experts, in nats.
    """
    sums = torch.zeros(5, device=device())  # layers, idle, dropped, entropy; then the maximum
    for router in routers:
        counts = router.counts.clone()
        dist.all_reduce(counts, group=parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True))
        load, entropy, tokens = counts[:-2], counts[-2], counts[-1]
        choices = tokens * top_k
        sums[:4] += torch.stack(
            [torch.ones_like(tokens), (load == 0).float().mean(), 1 - load.sum() / choices, entropy / tokens]
        )
        sums[4] = torch.maximum(sums[4], load.max() * len(load) / choices)
    group = parallel_state.get_pipeline_model_parallel_group()
    dist.all_reduce(sums[:4], group=group)
    dist.all_reduce(sums[4], op=dist.ReduceOp.MAX, group=group)
    layers, idle, dropped, entropy, busiest = sums.tolist()
    return {
        "experts/load_max": busiest,
        "experts/idle": idle / layers,
        "experts/dropped": dropped / layers,
        "experts/entropy": entropy / layers,
    }


class GroupedExperts(MegatronModule):
    """All experts of this rank in two tensors, with one grouped product each.

    Weights have vLLM's shapes: w13 [experts, 2 x ffn / etp, hidden], gate then up, and w2 [experts, hidden, ffn / etp].
    """

    def __init__(self, num_local_experts: int, config: TransformerConfig, pg_collection: Any = None, **_: Any) -> None:
        super().__init__(config=config)
        self._groups = pg_collection
        ffn, hidden = config.moe_ffn_hidden_size // pg_collection.expt_tp.size(), config.hidden_size
        options = {"dtype": config.params_dtype, "device": device()}
        self.w13 = torch.nn.Parameter(torch.empty(num_local_experts, 2 * ffn, hidden, **options))
        self.w2 = torch.nn.Parameter(torch.empty(num_local_experts, hidden, ffn, **options))
        for weight, dim in ((self.w13, 1), (self.w2, 2)):
            # Reduced over the experts' own data-parallel group, at any ep: checkpoints move between ep sizes.
            weight.allreduce = False
            weight.tensor_model_parallel, weight.partition_dim, weight.partition_stride = True, dim, 1

    def forward(
        self, x: Float[Tensor, "T hidden"], weights: Float32[Tensor, "T k"], choices: SortedChoices
    ) -> Float[Tensor, "T hidden"]:
        return expert_mlp(x, weights, self.w13, self.w2, choices)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """Global tensors [all experts, …]; gate and up are two parts of dim 1, each sharded over etp."""
        ep, etp, edp = self._groups.ep, self._groups.expt_tp, self._groups.expt_dp
        axis = len(sharded_offsets)
        experts, replica = (axis, ep.rank(), ep.size()), (0, 0, edp.rank())

        def halves(key: str, weight: Tensor, replica_id: tuple, flattened_range: slice | None) -> list[ShardedTensor]:
            assert flattened_range is None
            return [
                ShardedTensor.from_rank_offsets(
                    key,
                    half,
                    *sharded_offsets,
                    experts,
                    (axis + 1, part * etp.size() + etp.rank(), 2 * etp.size()),
                    replica_id=replica_id,
                    prepend_axis_num=axis,
                )
                for part, half in enumerate(weight.chunk(2, dim=1))
            ]

        w13 = ShardedTensorFactory(f"{prefix}w13", self.w13, halves, lambda parts: torch.cat(parts, dim=1), replica)
        w2 = ShardedTensor.from_rank_offsets(
            f"{prefix}w2",
            self.w2,
            *sharded_offsets,
            experts,
            (axis + 2, etp.rank(), etp.size()),
            replica_id=replica,
            prepend_axis_num=axis,
        )
        return {f"{prefix}w13": w13, f"{prefix}w2": w2}
