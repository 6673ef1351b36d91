"""Phases of a running attempt's ranks, for the progress of `rlhpc status RUN --follow`."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from rlhpc.core import attempts
from rlhpc.core.heartbeat import beats_file, read_beats
from rlhpc.core.text import duration, printable
from rlhpc.launch.roles import attempt_roles
from rlhpc.launch.runs.run_registry import RunEntry
from rlhpc.sharding.placement import Placement

_IDLE_SECONDS = 10.0  # shown from here on
_GROUPS, _RANGES = 6, 8  # in the line; of a group


def ranks_line(run: RunEntry) -> str:
    """Ranks of the newest attempt by phase and step, the smallest groups first; empty without heartbeats."""
    groups = rank_groups(run)
    return " | ".join([*groups[:_GROUPS], *(["…"] if len(groups) > _GROUPS else [])])


def rank_groups(run: RunEntry) -> list[str]:
    """Words on each group of ranks in the same role, phase and step, as the launcher last wrote them."""
    try:
        folders = attempts.folders(run.folder)
        attempt = attempts.read_attempt(folders[-1]) if folders else None
        if attempt is None:
            return []
        beats = read_beats(folders[-1].heartbeats)
        age = time.time() - beats_file(folders[-1].heartbeats).stat().st_mtime
    except OSError:  # none yet, or a network file system refuses the file for a moment
        return []
    roles, found = attempt_roles(folders[-1], attempt.world_size), dict[tuple[str, str], tuple[list[int], float]]()
    for rank, beat in sorted(beats.items()):
        step = "" if beat.step is None else f", step {beat.step}"
        key = f"{'ended' if beat.ended else printable(beat.phase)}{step}", roles.role_of(rank).name if roles else ""
        ranks, idle = found.setdefault(key, ([], 0.0))
        ranks.append(rank)
        found[key] = ranks, 0.0 if beat.ended else max(idle, age + beat.idle)
    groups = sorted(found.items(), key=lambda group: (len(group[1][0]), group[1][0]))
    return [f"{words}: {_who(ranks, roles)}{_idle(idle)}" for (words, _), (ranks, idle) in groups]


def ranges(numbers: Iterable[int]) -> list[str]:
    """Ascending numbers as ranges: 0-3 and 7."""
    found: list[list[int]] = []
    for value in numbers:
        if found and value == found[-1][1] + 1:
            found[-1][1] = value
        else:
            found.append([value, value])
    return [str(first) if first == last else f"{first}-{last}" for first, last in found]


def _who(ranks: Sequence[int], roles: Placement | None) -> str:
    """The ranks, with the engine of all of them or else their role."""
    parts = ranges(ranks)
    words = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(parts[:_RANGES])}{', …' if len(parts) > _RANGES else ''}"
    if roles is None:
        return words
    labels, role = {roles.label(rank) for rank in ranks}, roles.role_of(ranks[0])
    return f"{words} ({labels.pop() if len(labels) == 1 and role is roles.engines else role.name})"


def _idle(seconds: float) -> str:
    return f", {duration(seconds)} without progress" if seconds >= _IDLE_SECONDS else ""
