"""States that engines begin with, other than their own of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlhpc.rollout.schedule.terms import Terms

State = dict[str, Any]  # JSON


def first_state(version: int = 0, group: int = 0) -> State:
    """State of every engine of a run that begins with ``version``, whose step trains on the groups from ``group`` on:
    after steps in another placement, or at the beginning."""
    return {
        "version": version,
        "clock": 0,
        "due": 0,
        "first": group,
        "next": None,
        "started": [],
        "requests": 0,
        "calls": [],
        "ended": [],
    }


def redistributed(
    terms: Terms, states: Sequence[Mapping[str, Any]], requests: Sequence[int], calls: Sequence[Sequence[int]]
) -> list[State]:
    """States of ``terms.engines`` engines from those that another number of engines wrote at one version: each group
    in flight or ended goes to the engine that groups of its number now belong to, none is lost or started again.

    ``requests``, ``calls``: number of requests in each new engine and keys of its tool calls in progress, which are
    called again and due as if called now. The continuation differs from that of the engines that wrote the states.
    """
    first, engines, clock = states[0]["first"], len(states), max(state["clock"] for state in states)
    assert len({(state["version"], state["due"], state["first"]) for state in states}) == 1, "states of one version"
    started: set[int] = set()
    for engine, state in enumerate(states):
        own = first + (engine - first) % engines
        started |= {*range(own, own if state["next"] is None else state["next"], engines), *state["started"]}
    ended = sorted(tuple(end) for state in states for end in state["ended"])
    found = []
    for engine in range(terms.engines):
        group = first + (engine - first) % terms.engines
        while group in started:
            group += terms.engines
        found.append(
            {
                "version": states[0]["version"],
                "clock": clock,
                "due": states[0]["due"],
                "first": first,
                "next": group,
                "started": sorted(own for own in started if own > group and terms.engine_of(own) == engine),
                "requests": requests[engine],
                "calls": [(clock + terms.costs.tool, key) for key in calls[engine]],
                "ended": [end for end in ended if terms.engine_of(end[0]) == engine],
            }
        )
    return found
