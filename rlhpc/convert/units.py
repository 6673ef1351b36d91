"""Sizes and times in words."""

from __future__ import annotations


def size_text(count: float) -> str:
    """Bytes in the largest unit that leaves a digit before the point."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.4g} {unit}"
        count /= 1000
    return f"{count:.4g} TB" if count < 1000 else f"{count:,.0f} TB"


def time_text(seconds: float) -> str:
    """Time in its largest unit, with at least two digits from a minute on."""
    if seconds < 120:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:,.1f} h"
