"""Tokens in the order of the experts that they choose, and back: rows are gathered in both directions, never added."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int, Int32, Int64
from torch import Tensor

from rlhpc.backends.kernels.compiled import compiled


@dataclass(frozen=True)
class SortedChoices:
    """The T x k choices of T tokens as rows, sorted by expert and then by token. The host knows no count of an expert.

    With ``partial``, some choices have no row: N < T x k, and their place is N or above.
    """

    order: Int64[Tensor, " N"]  # choice (token x k + its number) of each row
    tokens: Int64[Tensor, " N"]
    places: Int64[Tensor, "T k"]  # row of each choice
    ends: Int32[Tensor, " experts"]  # rows up to the end of each expert's
    partial: bool = False


def sort_choices(
    experts: Int[Tensor, "T k"], numbers: Int64[Tensor, " experts"], *, some: bool = False
) -> SortedChoices:
    """Sorts the choices stably. ``numbers``: 0, 1, ...

    With ``some``, choices of experts above ``numbers`` get no row; the host waits for the number of rows.
    """
    ranked, order = experts.flatten().sort(stable=True)
    tokens, places, ends = _arrange(ranked, order, experts, numbers)
    if some:
        count = int(ends[-1])
        return SortedChoices(order[:count], tokens[:count], places, ends, partial=count < len(order))
    return SortedChoices(order, tokens, places, ends)


@compiled
def _arrange(
    ranked: Tensor, order: Tensor, experts: Tensor, numbers: Tensor
) -> tuple[Int64[Tensor, " N"], Int64[Tensor, "T k"], Int32[Tensor, " experts"]]:
    rows = torch.arange(order.numel(), device=order.device)
    places = torch.empty_like(order).scatter(0, order, rows).view(experts.shape)
    ends = torch.searchsorted(ranked, numbers, right=True, out_int32=True)
    return order // experts.size(1), places, ends


def take_rows(x: Float[Tensor, "T hidden"], choices: SortedChoices) -> Float[Tensor, "N hidden"]:
    """Each row's token."""
    return _TakeRows.apply(x, choices)


def sum_rows(rows: Float[Tensor, "N hidden"], choices: SortedChoices) -> Float[Tensor, "T hidden"]:
    """The sum of each token's rows."""
    return _SumRows.apply(rows, choices)


def take_choices(values: Float[Tensor, "T k"], choices: SortedChoices) -> Float[Tensor, " N"]:
    """Each row's value."""
    return _TakeChoices.apply(values, choices)


def summed(
    rows: Float[Tensor, "N hidden"], places: Int64[Tensor, "T k"], *, partial: bool
) -> Float[Tensor, "T hidden"]:
    """``sum_rows`` without a gradient."""
    if not len(rows):
        return rows.new_zeros(len(places), rows.size(1))
    if partial:
        return _sum_some(rows, places)
    if places.size(1) == 1:
        return rows.index_select(0, places[:, 0])
    return _sum_all(rows, places)


def values_of_choices(
    values: Float[Tensor, " N"], places: Int64[Tensor, "T k"], *, partial: bool
) -> Float[Tensor, "T k"]:
    """Each choice's value, 0 of one without a row."""
    if not len(values):
        return values.new_zeros(places.shape)
    return _some_values(values, places) if partial else values[places]


@compiled
def _sum_all(rows: Tensor, places: Tensor) -> Tensor:
    return rows[places].sum(1)


@compiled
def _sum_some(rows: Tensor, places: Tensor) -> Tensor:
    taken = rows[places.clamp(max=rows.size(0) - 1)]
    return torch.where((places < rows.size(0))[..., None], taken, 0).sum(1)


@compiled
def _some_values(values: Tensor, places: Tensor) -> Tensor:
    return torch.where(places < values.size(0), values[places.clamp(max=values.size(0) - 1)], 0)


class _TakeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, choices: SortedChoices) -> Tensor:
        ctx.save_for_backward(choices.places)
        ctx.partial = choices.partial
        return x.index_select(0, choices.tokens)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (places,) = ctx.saved_tensors
        return summed(gradient, places, partial=ctx.partial), None


class _SumRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, choices: SortedChoices) -> Tensor:
        ctx.save_for_backward(choices.tokens)
        return summed(rows, choices.places, partial=choices.partial)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (tokens,) = ctx.saved_tensors
        return gradient.index_select(0, tokens), None


class _TakeChoices(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, choices: SortedChoices) -> Tensor:
        ctx.save_for_backward(choices.places)
        ctx.partial = choices.partial
        return values.flatten().index_select(0, choices.order)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (places,) = ctx.saved_tensors
        return values_of_choices(gradient, places, partial=ctx.partial), None
