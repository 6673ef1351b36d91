"""Times and durations as Slurm writes them."""

from __future__ import annotations

from datetime import datetime


def seconds_of(text: str | int) -> int | None:
    """Seconds of a duration as sbatch takes it and squeue shows it: M, M:S, H:M:S, D-H, D-H:M, D-H:M:S. None for
    anything else, such as UNLIMITED, NOT_SET or N/A."""
    days, dash, rest = str(text).strip().rpartition("-")
    parts = rest.split(":")
    if not all(part.isdecimal() for part in (*parts, *([days] if dash else []))) or len(parts) > 3:
        return None
    numbers = [int(part) for part in parts]
    if dash:
        hours, minutes, seconds = (*numbers, 0, 0)[:3]
    elif len(numbers) == 3:
        hours, minutes, seconds = numbers
    else:
        hours, (minutes, seconds) = 0, (*numbers, 0)[:2]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def time_of(text: str) -> float | None:
    """Unix time of 2026-11-21T10:31:00 in this machine's time zone; None for N/A, Unknown, None."""
    try:
        return datetime.fromisoformat(text.strip()).timestamp()
    except ValueError:
        return None


def clock(time: float, now: float) -> str:
    """A time as 14:05, with the day if it is not today."""
    moment, today = datetime.fromtimestamp(time), datetime.fromtimestamp(now)
    return moment.strftime("%H:%M" if moment.date() == today.date() else "%a %d %b %H:%M")
