"""Finds the rank that blocks the others in a hang of a job with roles: ranks that train, and ranks that generate. Pure.

Each role has a world of its own, in which the collectives show who waits for whom. Between the roles, only stacks do.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlhpc.launch.supervise.hang_analysis import Finding, RankState, find_blocking_rank


def find_blocking_role(states: Sequence[RankState]) -> Finding:
    """The rank that the others wait for, of any role, and a line on where it is and what they wait in."""
    sides: dict[str, list[RankState]] = {}
    for state in states:
        sides.setdefault(state.role.partition(" ")[0], []).append(state)
    if len(sides) < 2:
        return find_blocking_rank(states)
    findings = {side: find_blocking_rank(members) for side, members in sides.items()}
    waiting = {side for side, members in sides.items() if _waits(findings[side], members)}
    blocking = [side for side in sides if side not in waiting]
    if not blocking:
        return Finding(-1, "", "; ".join(findings[side].message for side in sides))
    side = min(blocking, key=lambda side: (findings[side].rank < 0, _blame(findings[side], sides[side])))
    found, others = findings[side], [other for other in sides if other in waiting]
    behind = " and ".join(f"the {other}s" for other in others)
    return Finding(
        found.rank, found.node, f"{found.message}; {behind} wait for the {side}s" if behind else found.message
    )


def _waits(finding: Finding, members: Sequence[RankState]) -> bool:
    """Whether a role waits for another one: its finding is a rank that does, or is none, and some rank does."""
    if finding.rank < 0:
        return any(state.waits_elsewhere for state in members)
    return next(state for state in members if state.rank == finding.rank).waits_elsewhere


def _blame(finding: Finding, members: Sequence[RankState]) -> bool:
    """Whether the found rank answers: one that does not is more to blame."""
    return any(state.rank == finding.rank and state.condition == "answered" for state in members)
