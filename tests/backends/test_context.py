"""Attention cut over 2 and 4 context-parallel ranks, by both exchanges, against one rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.helpers.attention_cases import (
    CASES,
    Case,
    attention,
    batch,
    farthest,
    inputs,
    one_at_a_time,
    outcome,
    rotary_table,
)
from tests.helpers.distributed import run_ranks

pytestmark = pytest.mark.ranks

METHODS = ("all_gather", "a2a")


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """What each rank found. One start of ranks for all tests."""
    return run_ranks(_measure, request.param)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients_equal_one_rank(ranks: list[dict[str, Any]], name: str, method: str) -> None:
    """Of queries, keys and values, from a loss over the whole batch that every rank computes."""
    assert all(found["attention"][name, method] < 1e-5 for found in ranks), [found["attention"] for found in ranks]


def test_gathered_values_are_the_whole_batchs_on_every_rank(ranks: list[dict[str, Any]]) -> None:
    assert all(found["gathered equal"] for found in ranks)


@pytest.mark.parametrize("method", METHODS)
def test_a_parameters_gradient_is_the_sum_over_ranks(ranks: list[dict[str, Any]], method: str) -> None:
    assert all(found["parameter"][method] < 1e-5 for found in ranks), [found["parameter"] for found in ranks]


@pytest.mark.parametrize("method", METHODS)
def test_what_fills_up_changes_nothing(ranks: list[dict[str, Any]], method: str) -> None:
    """The tokens that make chunks equal carry no gradient and are seen by no other token."""
    assert all(found["filling"][method] == 0 for found in ranks)


def _measure() -> dict[str, Any]:
    torch.manual_seed(dist.get_rank())  # nothing may depend on it
    return {
        "attention": {(name, method): _difference(CASES[name], method) for name in CASES for method in METHODS},
        "gathered equal": _gathered_equal(CASES["as many keys as queries"]),
        "parameter": {method: _parameter_difference(CASES["grouped queries"], method) for method in METHODS},
        "filling": {method: _filling_difference(CASES["short"], method) for method in METHODS},
    }


def _local(case: Case, align: int = 3) -> Any:
    from rlhpc.backends.megatron.packed import local_batch
    from rlhpc.sharding.context_split import split_context

    split = split_context(case.lengths, dist.get_world_size(), align)
    return local_batch(batch(case), split, dist.get_rank(), rotary_table(case))


def _difference(case: Case, method: str) -> float:
    """Between this rank's part of what one rank computes, and what it computes with the others."""
    local, group = _local(case), dist.group.WORLD
    *whole, gradient = inputs(case)
    leaves = [local.select(x).requires_grad_() for x in whole]
    output = attention(case, method, group)(*leaves, packed_seq_params=local.params)
    ours = outcome(local.gather(output, group), gradient, *leaves)

    whole = [x.requires_grad_() for x in whole]
    expected, *gradients = outcome(one_at_a_time(case, *whole), gradient, *whole)
    return farthest(ours, [expected, *map(local.select, gradients)])


def _gathered_equal(case: Case) -> bool:
    local, packed = _local(case), batch(case)
    positions = local.gather(local.select(packed.positions), dist.group.WORLD)
    rows = torch.arange(2.0 * len(packed.tokens)).view(-1, 2)
    both = local.gather(local.select(rows), dist.group.WORLD)
    return torch.equal(positions, packed.positions) and torch.equal(both, rows)


def _parameter_difference(case: Case, method: str) -> float:
    """A linear layer before attention: its gradient over all ranks, as Megatron sums it, against one rank's."""
    group, local = dist.group.WORLD, _local(case)
    query, key, value, gradient = inputs(case)
    hidden = torch.randn(len(query), 12, generator=torch.Generator().manual_seed(1))
    weight = torch.randn(12, case.heads * case.dim, generator=torch.Generator().manual_seed(2)).requires_grad_()

    def queries(x: torch.Tensor) -> torch.Tensor:
        return (x @ weight * 0.1).unflatten(-1, (case.heads, case.dim))

    output = attention(case, method, group)(
        queries(local.select(hidden)), local.select(key), local.select(value), packed_seq_params=local.params
    )
    _, ours = outcome(local.gather(output, group), gradient, weight)
    dist.all_reduce(ours, group=group)
    _, theirs = outcome(one_at_a_time(case, queries(hidden), key, value), gradient, weight)
    return farthest([ours], [theirs])


def _filling_difference(case: Case, method: str) -> float:
    """What changes at true tokens when those that fill up hold other values, and the gradient of these."""
    local, group = _local(case), dist.group.WORLD
    *whole, _ = inputs(case)
    filling = (local.params.context.packed < 0)[:, None, None]
    outputs, stray = [], 0.0
    for value in (0.0, 7.0):
        leaves = [local.select(x).masked_fill(filling, value).requires_grad_() for x in whole]
        output = local.gather(attention(case, method, group)(*leaves, packed_seq_params=local.params), group)
        gradients = torch.autograd.grad(output.sum(), leaves)
        stray += sum(float(gradient.masked_select(filling).abs().sum()) for gradient in gradients)
        outputs.append(output)
    return stray + farthest(outputs[:1], outputs[1:])
