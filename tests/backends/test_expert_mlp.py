"""Experts' MLPs, weights of routed experts and the order of rows, against the plain form by autograd."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from rlhpc.backends.kernels.choices import sort_choices, sum_rows, take_choices, take_rows
from rlhpc.backends.kernels.expert_mlp import expert_mlp
from rlhpc.backends.megatron.experts import WeightRule, count_routes, route_weights

pytestmark = pytest.mark.heavy

TOKENS, EXPERTS, TOP_K, HIDDEN, FFN = 13, 6, 2, 8, 16


@pytest.mark.parametrize("rule", get_args(WeightRule))
def test_outputs_and_gradients_are_those_of_the_plain_form(rule: WeightRule) -> None:
    leaves = _leaves()
    selected = leaves[1].topk(TOP_K).indices

    def own(x: Tensor, logits: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
        weights = route_weights(logits, selected, rule, 2.5)
        return expert_mlp(x, weights, w13, w2, sort_choices(selected, torch.arange(EXPERTS)))

    def plain(x: Tensor, logits: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
        return _plain(x, _plain_weights(logits, selected, rule) * 2.5, w13, w2, selected)

    _assert_near(own, plain, leaves)


@pytest.mark.parametrize("here", [3, 0])
def test_choices_of_other_ranks_experts_have_no_rows(here: int) -> None:
    """Of the first experts alone; with 0 no token selects one of them."""
    x, logits, w13, w2 = _leaves()
    selected = logits.topk(TOP_K).indices.clamp(min=3) if not here else logits.topk(TOP_K).indices
    weights = logits.detach().sigmoid().gather(1, selected).requires_grad_()
    choices = sort_choices(selected, torch.arange(3), some=True)
    assert choices.partial
    assert len(choices.order) == int((selected < 3).sum())

    def own(x: Tensor, weights: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
        return expert_mlp(x, weights, w13[:3], w2[:3], choices)

    def plain(x: Tensor, weights: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
        return _plain(x, weights * (selected < 3), w13, w2, selected)

    _assert_near(own, plain, (x, weights, w13, w2))


def test_rows_come_by_expert_and_then_by_token_and_back() -> None:
    selected = torch.tensor([[2, 0], [0, 1], [2, 1]])
    choices = sort_choices(selected, torch.arange(4))
    assert choices.tokens.tolist() == [0, 1, 1, 2, 0, 2]
    assert choices.ends.tolist() == [2, 4, 6, 6]
    x = torch.tensor([[1.0], [10.0], [100.0]], requires_grad=True)
    values = torch.arange(6.0).view(3, 2).requires_grad_()
    rows, of_rows = take_rows(x, choices), take_choices(values, choices)
    assert of_rows.tolist() == [1, 2, 3, 5, 0, 4]
    assert sum_rows(rows, choices).tolist() == (2 * x).tolist()
    (rows[:, 0] * of_rows.detach()).sum().backward()
    (of_rows * torch.arange(6.0)).sum().backward()
    assert x.grad is not None
    assert values.grad is not None
    assert x.grad.tolist() == [[1], [5], [9]]
    assert values.grad.tolist() == [[4, 0], [1, 2], [5, 3]]


def test_routed_experts_are_counted_with_the_entropy_of_their_distribution() -> None:
    logits = torch.tensor([[0.0, 0.0, 0.0], [50.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    counts = torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0])
    experts, counted = torch.tensor([[2, 0], [0, 2], [1, 2]]), torch.tensor([True, True, False])
    assert count_routes(logits, experts, counted, counts, "selected_softmax").tolist() == [2, 0, 2]
    *load, entropy, tokens = counts.tolist()
    assert load == [3, 1, 3]
    assert entropy == pytest.approx(torch.tensor(3.0).log().item())
    assert tokens == 2


def _leaves() -> tuple[Tensor, ...]:
    """(x, logits, w13, w2)"""
    generator = torch.Generator().manual_seed(3)
    shapes = (TOKENS, HIDDEN), (TOKENS, EXPERTS), (EXPERTS, 2 * FFN, HIDDEN), (EXPERTS, HIDDEN, FFN)
    return tuple(torch.randn(shape, generator=generator).requires_grad_() for shape in shapes)


def _plain_weights(logits: Tensor, selected: Tensor, rule: WeightRule) -> Tensor:
    if rule == "softmax":
        return logits.softmax(-1).gather(1, selected)
    if rule == "selected_softmax":
        return logits.gather(1, selected).softmax(-1)
    scores = logits.sigmoid().gather(1, selected)
    return scores / scores.sum(-1, keepdim=True) if rule == "selected_sigmoid" else scores


def _plain(x: Tensor, weights: Tensor, w13: Tensor, w2: Tensor, selected: Tensor) -> Tensor:
    """Every expert on every token, times the weights of those selected."""
    gate, up = torch.einsum("td,efd->tef", x, w13).chunk(2, dim=-1)
    outputs = torch.einsum("tef,edf->ted", torch.nn.functional.silu(gate) * up, w2)
    spread = torch.zeros(len(x), len(w13)).scatter(1, selected, weights)
    return (outputs * spread[..., None]).sum(1)


def _assert_near(own: Any, plain: Any, leaves: tuple[Tensor, ...]) -> None:
    """Two runs of ``own`` are bit-equal too."""
    first, again, expected = (_results(function, leaves) for function in (own, own, plain))
    for one, other, wanted in zip(first, again, expected, strict=True):
        assert torch.equal(one, other)
        assert (one - wanted).abs().max() < 1e-5 * wanted.abs().max().clamp(min=1)


def _results(function: Any, leaves: tuple[Tensor, ...]) -> list[Tensor]:
    output = function(*leaves)
    gradient = torch.linspace(-1, 1, output.numel()).view(output.shape)
    return [output, *torch.autograd.grad(output, leaves, gradient)]
