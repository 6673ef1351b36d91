"""Selected experts and their weights, against the maps that Megatron makes of the same logits."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlhpc.backends.megatron.experts import choose_experts, route_weights, weight_rule

pytestmark = pytest.mark.heavy

TOKENS, EXPERTS = 50, 16


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_experts_weights_and_gradients_are_those_of_megatron(score: str) -> None:
    from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function

    generator = torch.Generator().manual_seed(0)
    biases = [None, torch.randn(EXPERTS, generator=generator)] if score == "sigmoid" else [None]
    for top_k, early, groups, bias, scale in product((1, 2, 4), (True, False), (None, 4), biases, (None, 2.5)):
        if groups and top_k == 1:
            continue
        config = _config(score, top_k, early=early and score == "softmax", groups=groups)
        logits = 5 * torch.randn(TOKENS, EXPERTS, generator=generator)
        theirs, ours = (logits.clone().requires_grad_() for _ in range(2))
        wanted, map = topk_routing_with_score_function(
            theirs,
            top_k,
            use_pre_softmax=config.moe_router_pre_softmax,
            num_groups=config.moe_router_num_groups,
            group_topk=config.moe_router_group_topk,
            scaling_factor=scale,
            score_function=score,
            expert_bias=bias,
        )
        selected = choose_experts(ours, config, bias, torch.zeros(TOKENS, 1, dtype=torch.int16))
        weights = route_weights(ours, selected, weight_rule(config), scale or 1.0)
        gradient = torch.randn(TOKENS, EXPERTS, generator=generator)
        (expected,) = torch.autograd.grad(wanted, theirs, gradient)
        (found,) = torch.autograd.grad(weights, ours, gradient.gather(1, selected))
        assert torch.equal(torch.zeros_like(map).scatter(1, selected, value=True), map)
        assert (weights - wanted.gather(1, selected)).abs().max() < 1e-6
        assert (found - expected).abs().max() < 1e-6


def test_tokens_with_given_experts_take_them_and_others_choose() -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0], [0.0, 1.0, 2.0, 3.0], [0.0, 1.0, 2.0, 3.0]])
    given = torch.tensor([[0, 0], [1, 3], [-1, -1]], dtype=torch.int16)
    config = _config("softmax", 2, early=False, groups=None)
    assert choose_experts(logits, config, None, given).tolist() == [[0, 1], [0, 2], [3, 2]]


def _config(score: str, top_k: int, *, early: bool, groups: int | None) -> Any:
    return SimpleNamespace(
        moe_router_score_function=score,
        moe_router_pre_softmax=early,
        moe_router_topk=top_k,
        moe_router_num_groups=groups,
        moe_router_group_topk=groups and 2,
    )
