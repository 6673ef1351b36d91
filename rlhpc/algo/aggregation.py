"""Means over tokens that do not depend on packing or the number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Shares:
    """Weight of a token of each response in the loss sum, and the denominator of the sum over all ranks."""

    weights: tuple[float, ...]
    denominator: float


def shares(lengths: Sequence[int], aggregation: str, constant: int) -> Shares:
    """For a minibatch of responses with ``lengths`` trained tokens. A response with none has no share.

    token-mean: over tokens (DAPO); sequence-mean: over responses of their token means (GRPO, GSPO as published);
    constant: over responses of their token sums over ``constant`` (Dr. GRPO).
    """
    responses = sum(length > 0 for length in lengths) or 1  # without any, sums are 0 and so is the mean
    match aggregation:
        case "token-mean":
            return Shares((1.0,) * len(lengths), float(sum(lengths) or 1))
        case "sequence-mean":
            return Shares(tuple(1.0 / max(length, 1) for length in lengths), float(responses))
        case "constant":
            return Shares((1.0,) * len(lengths), float(responses * constant))
    raise AssertionError(f"unknown aggregation {aggregation}")
