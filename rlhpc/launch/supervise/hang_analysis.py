"""Finds the rank that blocks the others in a hang, from the stacks and collectives of all ranks. Pure.

In a job with roles, each role has a world of its own, in which the collectives show the order of waiting. Between the
roles, only stacks do.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Container, Mapping, Sequence, Set
from dataclasses import dataclass
from math import prod
from typing import Literal

from rlhpc.core.heartbeat import Collective, GroupState

# answered: its heartbeat ran; stuck: only faulthandler's signal worked; silent: not even that; absent: never started.
Condition = Literal["answered", "stuck", "silent", "absent", "ended"]
_WORST_FIRST: tuple[Condition, ...] = ("silent", "stuck", "absent", "ended", "answered")

_THREAD = re.compile(r"^(?:(?:Current t|T)hread 0x([0-9a-f]+)|Stack) \(most recent call first\):")
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')
_NOT_OWN = re.compile(r"/(site|dist)-packages/|/lib(64)?/python3[.\d]*/|^<")
_OWN_PACKAGE = re.compile(r"/rlhpc/\w")
# Files in which a rank waits for others.
_WAITING = re.compile(r"/torch/distributed/|/rlhpc/core/store_client\.py$")
_STORE = re.compile(r"/rlhpc/(core/store_client|parallel/store)\.py$")
# Exchanges with ranks outside of the world of this one.
_EXCHANGE = re.compile(r"/rlhpc/parallel/(board|channel|pairs)\.py$")
_SIDES = re.compile(r"/rlhpc/(reshard/staged|rollout/generator|trainer)/\w+\.py$")
# A rank that polls while it waits is in one of these files, and its phase shows for whom it waits.
_POLLING = re.compile(r"/rlhpc/(parallel|rollout|rollout/generator|rollout/schedule|reshard/staged)/\w+\.py$")
_FOR_OTHERS = re.compile(r"waiting for (weights|engines|trainers)")
_FOR_OWN = re.compile(r"waiting for (rewards|tools)")
# Operations whose inputs have equal sizes on all ranks.
_EVEN = {"all_reduce", "broadcast", "reduce"}


@dataclass(frozen=True)
class Frame:
    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.function}: {self.file}:{self.line}"

    @property
    def is_own(self) -> bool:
        """True if it is rlhpc's or the user's, not a library's, and no means of communication."""
        return not (self.is_library or _EXCHANGE.search(self.file))

    @property
    def is_library(self) -> bool:
        """True if it is a library's, or access to the job's store."""
        if _STORE.search(self.file):
            return True
        return bool(_NOT_OWN.search(self.file)) and not _OWN_PACKAGE.search(self.file)


@dataclass(frozen=True)
class RankState:
    """State of one rank. ``frames``: Python stack of the main thread, innermost first; ``groups``: last collectives;
    ``role``: its role in words, such as ``engine 1``, empty in a job without roles."""

    rank: int
    node: str = ""
    condition: Condition = "answered"
    phase: str = ""
    step: int | None = None
    idle: float | None = None
    frames: tuple[Frame, ...] = ()
    groups: tuple[GroupState, ...] = ()
    role: str = ""

    @property
    def own_frame(self) -> Frame | None:
        return next((frame for frame in self.frames if frame.is_own), None)

    @property
    def waits_by_stack(self) -> bool:
        """True if its innermost calls are communication in torch or the job's store."""
        return any(_WAITING.search(frame.file) for frame in self.frames[:4])

    @property
    def waits_elsewhere(self) -> bool:
        """True if it waits for a rank outside of all of its groups: of another role, or of another engine."""
        frame = next((frame for frame in self.frames if not frame.is_library), None)
        if frame is None or self.condition != "answered" or _FOR_OWN.match(self.phase):
            return False
        if _EXCHANGE.search(frame.file) or (_SIDES.search(frame.file) and "wait" in frame.function):
            return True
        return bool(_FOR_OTHERS.match(self.phase) and _POLLING.search(frame.file))

    @property
    def where(self) -> str:
        """Phase, and innermost frame of rlhpc's or the user's code."""
        frame = f" ({self.own_frame})" if self.own_frame else ""
        return f"{self.phase}{frame}"

    @property
    def name(self) -> str:
        rank = f"rank {self.rank} ({self.role})" if self.role else f"rank {self.rank}"
        return f"{rank} on {self.node}" if self.node else rank

    def finding(self, message: str) -> Finding:
        return Finding(self.rank, self.node, message)


@dataclass(frozen=True)
class Finding:
    """The rank at fault, and a line on it. ``rank`` -1: none in particular."""

    rank: int
    node: str
    message: str


@dataclass(frozen=True)
class _Wait:
    """A collective in which ranks of a group wait for those that have not called it."""

    group: GroupState
    call: Collective
    waiting: tuple[int, ...]
    missing: tuple[int, ...]

    @property
    def text(self) -> str:
        return f"{self.call.operation} #{self.call.sequence} of {_group(self.group)}"


# Each group by its key: its state on each of its ranks.
_Groups = dict[tuple[str, str], dict[int, GroupState]]


def parse_stacks(text: str, main_thread: int) -> tuple[Frame, ...]:
    """Frames of the main thread in faulthandler's output, innermost first. A stack without a thread is the main one's.
    The newest of several dumps counts."""
    threads: dict[int, list[Frame]] = {}
    frames: list[Frame] = []
    for line in text.splitlines():
        if match := _THREAD.match(line):
            frames = []
            threads[int(match[1], 16) if match[1] else main_thread] = frames
        elif match := _FRAME.match(line):
            frames.append(Frame(match[1], int(match[2]), match[3]))
    return tuple(threads.get(main_thread, frames))


def find_blocking_rank(states: Sequence[RankState]) -> Finding:
    """Finds the rank that the others wait for, its place, and the collective in which they wait."""
    by_rank = {state.rank: state for state in states}
    groups: _Groups = {}
    for state in states:
        for group in state.groups:
            groups.setdefault(group.key, {})[state.rank] = group
    found = _mismatch(by_rank, groups)
    if found is not None:
        return found
    waits = [wait for views in groups.values() for wait in _waits(views, by_rank)]
    elsewhere = {state.rank for state in states if state.waits_elsewhere}
    inside = [wait for wait in waits if not elsewhere.issuperset(wait.missing)]
    return (
        _awaited(by_rank, waits, elsewhere)
        or (_not_waiting(states, waits) if elsewhere else None)
        or _miscounted(by_rank, inside)
        or _crossed(by_rank, inside)
        or _without_collectives(states)
    )


def _waits(views: Mapping[int, GroupState], known: Container[int]) -> list[_Wait]:
    """Waits of a group: one for each collective in flight that not all of its ranks have called."""
    pending: dict[int, list[int]] = {}
    for rank, view in views.items():
        if view.pending is not None:
            pending.setdefault(view.pending.sequence, []).append(rank)
    found = []
    for sequence, waiting in sorted(pending.items()):
        group = views[waiting[0]]
        missing = [r for r in group.ranks if r in known and (r not in views or views[r].last.sequence < sequence)]
        call = group.at(sequence)
        if missing and call is not None:
            found.append(_Wait(group, call, tuple(waiting), tuple(missing)))
    return found


def _mismatch(by_rank: Mapping[int, RankState], groups: _Groups) -> Finding | None:
    """Finding if ranks of a group call different collectives with one number; the minority is at fault."""
    for views in groups.values():
        for sequence in sorted({view.pending.sequence for view in views.values() if view.pending is not None}):
            calls = {rank: call for rank, view in views.items() if (call := view.at(sequence)) is not None}
            kinds = Counter(_kind(call) for call in calls.values())
            if len(kinds) > 1:
                return _mismatch_finding(by_rank, next(iter(views.values())), calls, kinds)
    return None


def _kind(call: Collective) -> tuple[str, int]:
    """Part of a call that must be equal on all ranks: the operation, and for some operations the number of elements."""
    return call.operation, sum(map(prod, call.sizes)) if call.operation in _EVEN else 0


def _mismatch_finding(
    by_rank: Mapping[int, RankState],
    group: GroupState,
    calls: Mapping[int, Collective],
    kinds: Counter[tuple[str, int]],
) -> Finding:
    fewest = min(kinds, key=lambda kind: kinds[kind])
    usual = max((kind for kind in kinds if kind != fewest), key=lambda kind: kinds[kind])
    odd = by_rank[min(rank for rank, call in calls.items() if _kind(call) == fewest)]
    theirs = next(call for call in calls.values() if _kind(call) == usual)
    sizes = fewest[0] == usual[0]
    own, other = _call(calls[odd.rank], with_sizes=sizes), _call(theirs, with_sizes=sizes)
    more = f" (and {_ranks(kinds[fewest] - 1)} more)" if kinds[fewest] > 1 else ""
    return odd.finding(
        f"{odd.name}{more} calls {own} in {odd.where} where {_ranks(kinds[usual])}"
        f" {'calls' if kinds[usual] == 1 else 'call'} {other}: #{theirs.sequence} of {_group(group)}",
    )


def _awaited(by_rank: Mapping[int, RankState], waits: Sequence[_Wait], elsewhere: Set[int]) -> Finding | None:
    """Finding on the rank that most others wait for, of those that wait for none. ``elsewhere``: ranks that wait
    outside of collectives."""
    waiting = {rank for wait in waits for rank in wait.waiting} | elsewhere
    awaited_in: dict[int, list[int]] = {}
    for place, wait in enumerate(waits):
        for rank in wait.missing:
            awaited_in.setdefault(rank, []).append(place)
    ends = [by_rank[rank] for rank in awaited_in if rank not in waiting]
    if not ends:
        return None
    counts = {places: len(_all_behind(places, waits, awaited_in)) for places in map(tuple, awaited_in.values())}

    def order(state: RankState) -> tuple[int, int, int]:
        return -counts[tuple(awaited_in[state.rank])], _WORST_FIRST.index(state.condition), state.rank

    blocking = min(ends, key=order)
    places = awaited_in[blocking.rank]
    alike = [s for s in ends if s.condition == blocking.condition and awaited_in[s.rank] == places]
    more = f" (and {_ranks(len(alike) - 1)} more)" if len(alike) > 1 else ""
    awaited = f"{_wait(counts[tuple(places)])} for it in {waits[places[0]].text}"
    return blocking.finding(f"{_doing(blocking)}{more} while {awaited}")


def _all_behind(places: Sequence[int], waits: Sequence[_Wait], awaited_in: Mapping[int, Sequence[int]]) -> set[int]:
    """Ranks that wait in ``places``, or for a rank that does."""
    found: set[int] = set()
    left, seen = list(places), set(places)
    while left:
        new = set(waits[left.pop()].waiting) - found
        found |= new
        following = {place for rank in new for place in awaited_in.get(rank, ())} - seen
        left += following
        seen |= following
    return found


def _not_waiting(states: Sequence[RankState], waits: Sequence[_Wait]) -> Finding | None:
    """Finding on ranks that wait neither in a collective nor elsewhere while others wait; None without any."""
    in_collectives = {rank for wait in waits for rank in wait.waiting}
    left = [state for state in states if state.rank not in in_collectives and not state.waits_elsewhere]
    worst = min((_WORST_FIRST.index(state.condition) for state in left), default=None)
    if worst is None:
        return None
    found = [state for state in left if state.condition == _WORST_FIRST[worst]]
    more = f" (and {_ranks(len(found) - 1)} more)" if len(found) > 1 else ""
    return found[0].finding(f"{_doing(found[0])}{more} while {_wait(len(states) - len(left))}")


def _miscounted(by_rank: Mapping[int, RankState], waits: Sequence[_Wait]) -> Finding | None:
    """Finding on a rank that waits in the same collective as others after fewer or more collectives in groups of the
    same description: it has skipped one, or called one too many."""
    for wait in waits:
        counts = {rank: _counts(by_rank[rank]) for rank in wait.waiting}
        for description in sorted({name for known in counts.values() for name in known}):
            found = {rank: known[description] for rank, known in counts.items() if description in known}
            (usual, agree), *rest = Counter(found.values()).most_common()
            if rest and agree > sum(number for _, number in rest):
                odd = by_rank[min(rank for rank, count in found.items() if count != usual)]
                return odd.finding(
                    f"{odd.name} waits in {wait.text} in {odd.where} after {found[odd.rank]} collectives of group"
                    f" {description} where {_ranks(agree)} got there after {usual}",
                )
    return None


def _counts(state: RankState) -> dict[str, int]:
    """Number of its collectives in each of its groups, by description."""
    named = [group for group in state.groups if group.description not in ("", "default_pg")]
    names = Counter(group.description for group in named)
    return {group.description: group.last.sequence for group in named if names[group.description] == 1}


def _crossed(by_rank: Mapping[int, RankState], waits: Sequence[_Wait]) -> Finding | None:
    """Finding for ranks that wait for each other in different groups. At fault is one whose stack shows no wait, else
    the one missing where most ranks wait for fewest."""
    if not waits:
        return None
    best: tuple[bool, float, int] | None = None
    for place, wait in enumerate(waits):
        idle = [rank for rank in wait.missing if not by_rank[rank].waits_by_stack]
        order = (not idle, -len(wait.waiting) / len(wait.missing), place)
        best = order if best is None else min(best, order)
    assert best is not None
    wait = waits[best[2]]
    blocking = by_rank[min(wait.missing, key=lambda rank: (by_rank[rank].waits_by_stack, rank))]
    own = next((w for w in waits if blocking.rank in w.waiting), None)
    doing = _doing(blocking)
    if own is not None and blocking.waits_by_stack:
        doing = f"{blocking.name} waits in {own.text} in {blocking.where}"
    return blocking.finding(f"{doing} while {_wait(len(wait.waiting))} for it in {wait.text}")


def _without_collectives(states: Sequence[RankState]) -> Finding:
    """Finding without collectives in flight: a rank that does not answer, else one whose stack shows no wait."""
    for condition in ("silent", "stuck", "absent"):
        found = [state for state in states if state.condition == condition]
        if found:
            more = f"; {_ranks(len(found) - 1)} more like it" if len(found) > 1 else ""
            return found[0].finding(f"{_doing(found[0])}{more}")
    busy = [state for state in states if state.condition == "answered" and not state.waits_by_stack]
    count = len(states) - len(busy)
    if busy and (count or len(busy) == 1):
        waiters = f" while {_wait(count)}" if count else ""
        more = f"; {_ranks(len(busy) - 1)} more like it" if len(busy) > 1 else ""
        return busy[0].finding(f"{_doing(busy[0])}{waiters}{more}")
    first = min(states, key=lambda state: state.rank)
    return Finding(-1, "", f"no rank stands out: {_doing(first)}, and {_ranks(len(states) - 1)} are similar")


def _doing(state: RankState) -> str:
    """The rank and its action, as the beginning of a sentence."""
    last = f"; last seen in {state.phase}" if state.phase else ""
    match state.condition:
        case "silent":
            return f"{state.name} does not answer (stopped, or its node is out of reach{last})"
        case "stuck":
            return f"{state.name} is stuck in native code ({state.own_frame or 'no frame is known'}{last})"
        case "absent":
            return f"{state.name} has not started"
        case "ended":
            return f"{state.name} has ended"
    return f"{state.name} is in {state.where}"


def _group(group: GroupState) -> str:
    if group.description in ("", "default_pg"):
        return "the default group" if group.group == "0" else f"group {group.group}"
    return f"group {group.description}"


def _call(call: Collective, *, with_sizes: bool) -> str:
    sizes = " ".join("x".join(map(str, size)) for size in call.sizes)
    return f"{call.operation} of {sizes}" if with_sizes else call.operation


def _wait(count: int) -> str:
    return f"{_ranks(count)} {'waits' if count == 1 else 'wait'}"


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


def find_blocking_role(states: Sequence[RankState]) -> Finding:
    """Finds the rank that the others wait for, of any role, its place, and the collective in which they wait."""
    sides: dict[str, list[RankState]] = {}
    for state in states:
        sides.setdefault(state.role.partition(" ")[0], []).append(state)
    if len(sides) < 2:
        return find_blocking_rank(states)
    findings = {side: find_blocking_rank(members) for side, members in sides.items()}
    waiting = {side for side, members in sides.items() if _waits_elsewhere(findings[side], members)}
    blocking = [side for side in sides if side not in waiting]
    if not blocking:
        return Finding(-1, "", "; ".join(findings[side].message for side in sides))
    side = min(blocking, key=lambda side: (findings[side].rank < 0, _blame(findings[side], sides[side])))
    found, others = findings[side], [other for other in sides if other in waiting]
    behind = " and ".join(f"the {other}s" for other in others)
    return Finding(
        found.rank, found.node, f"{found.message}; {behind} wait for the {side}s" if behind else found.message
    )


def _waits_elsewhere(finding: Finding, members: Sequence[RankState]) -> bool:
    """True if a role waits for another one: its finding is a rank that does, or none while some rank does."""
    if finding.rank < 0:
        return any(state.waits_elsewhere for state in members)
    return next(state for state in members if state.rank == finding.rank).waits_elsewhere


def _blame(finding: Finding, members: Sequence[RankState]) -> bool:
    """True if the found rank answers: one that does not is more to blame."""
    return any(state.rank == finding.rank and state.condition == "answered" for state in members)
