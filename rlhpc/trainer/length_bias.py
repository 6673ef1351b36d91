"""Counts the lengths of responses that a run trains on, and of those that it begins: their ratio is the length bias of
its choice of groups."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from rlhpc.api import RunState
from rlhpc.data.groups import Group


class Lengths(NamedTuple):
    """Number of responses, and of the tokens that the policy has sampled in them so far."""

    responses: int
    tokens: int


def count_trained(state: RunState, groups: Iterable[Group]) -> None:
    """Counts groups that a step trains on for the first time."""
    found = lengths_of(groups)
    state.trained_responses += found.responses
    state.trained_tokens += found.tokens


def count_dropped(state: RunState, groups: Iterable[Group]) -> None:
    """Counts groups that no step will train on."""
    found = lengths_of(groups)
    state.dropped_responses += found.responses
    state.dropped_tokens += found.tokens


def length_bias(state: RunState, carried: Iterable[Group]) -> float | None:
    """Mean length of all responses trained on so far, over that of all responses begun so far, the groups ``carried``
    to later steps included; None before the first."""
    rest = lengths_of(carried)
    responses = state.trained_responses + state.dropped_responses + rest.responses
    tokens = state.trained_tokens + state.dropped_tokens + rest.tokens
    if not state.trained_responses or not tokens:
        return None
    return (state.trained_tokens / state.trained_responses) / (tokens / responses)


def lengths_of(groups: Iterable[Group]) -> Lengths:
    """Those of the groups' responses that have begun."""
    lengths = [sample.sampled_len for group in groups for sample in group.samples if sample.sampled_len]
    return Lengths(len(lengths), sum(lengths))
