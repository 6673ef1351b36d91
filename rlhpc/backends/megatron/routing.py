"""Which experts a token goes to and with which weights, as values of its choices.

The mathematics is that of Megatron's TopKRouter (moe_utils.py, ``topk_routing_with_score_function``), which makes maps
[tokens, experts] of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float, Float32, Int16, Int32, Int64
from megatron.core.transformer.moe.moe_utils import group_limited_topk
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from rlhpc.backends.kernels.choices import SortedChoices
from rlhpc.backends.kernels.compiled import compiled

# softmax over all experts; over the selected ones; sigmoid, divided by the sum over the selected ones, or as it is
WeightRule = Literal["softmax", "selected_softmax", "selected_sigmoid", "sigmoid"]


@dataclass(frozen=True)
class Routing:
    """The experts of T tokens, their weights, and the order of the tokens by expert."""

    experts: Int64[Tensor, "T k"]
    weights: Float32[Tensor, "T k"]
    choices: SortedChoices


def weight_rule(config: TransformerConfig) -> WeightRule:
    """How the configuration's weights follow from logits."""
    if config.moe_router_score_function == "softmax":
        return "softmax" if config.moe_router_pre_softmax else "selected_softmax"
    return "selected_sigmoid" if config.moe_router_topk > 1 else "sigmoid"


def choose_experts(
    logits: Float[Tensor, "T experts"],
    config: TransformerConfig,
    bias: Float32[Tensor, " experts"] | None,
    given: Int16[Tensor, "T k"] | None = None,
) -> Int64[Tensor, "T k"]:
    """Experts with the largest scores, with the bias, in the kept groups.

    ``given``: experts of router replay, from 1; tokens with 0 choose for themselves.
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
    return own if given is None else _given_or_own(given, own)


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
    ends: Int32[Tensor, " experts"],
    load: Float32[Tensor, " experts"],
    entropy: Float32[Tensor, ""],
    tokens: Float32[Tensor, ""],
    rule: WeightRule,
) -> Float32[Tensor, " experts"]:
    """Adds tokens of each expert, the sum of the tokens' entropies and their number to the counts; returns the first.

    Entropies are of a token's distribution over all experts.
    """
    scores = logits.float()
    if rule in ("sigmoid", "selected_sigmoid"):
        scores = scores.sigmoid().log()
    log_probs = scores.log_softmax(-1)
    sizes = ends.diff(prepend=ends.new_zeros(1)).float()
    load += sizes
    entropy -= (log_probs.exp() * log_probs).sum()
    tokens += logits.size(0)
    return sizes
