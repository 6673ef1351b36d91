"""Phases and waits of every rank in the newest steps, as bars."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlhpc.core.spans import Span, StepTimeline, newest_timelines
from rlhpc.observe.page.packing import Numbers

_UNITS = 20_000  # in a step


def pack_timeline(path: Path, numbers: Numbers, most_spans: int) -> dict[str, Any] | None:
    """Newest steps of timeline.jsonl with at most ``most_spans`` spans together, but the last one; None without any."""
    steps: list[dict[str, Any]] = []
    phases: dict[str, int] = {}
    left = most_spans
    for timeline in newest_timelines(path):
        ranks = [_in_order(spans) for spans in timeline.ranks]
        left -= sum(map(len, ranks))
        if steps and left < 0:
            break
        steps.append(_packed(timeline, ranks, phases, numbers))
    return {"phases": list(phases), "steps": steps[::-1]} if steps else None


def _in_order(spans: Sequence[Span]) -> list[Span]:
    """Spans in the order in which they are drawn, one inside another after it, without impossible ones."""
    possible = [span for span in spans if 0 <= span.begin <= span.end < 1e9]
    return sorted(possible, key=lambda span: (span.begin, -span.end))


def _packed(
    timeline: StepTimeline, ranks: list[list[Span]], phases: dict[str, int], numbers: Numbers
) -> dict[str, Any]:
    """Places of a step's spans: columns for all ranks, and the number of spans of each rank.

    ``gaps``, ``lasts`` and ``waits``: time since the end of the rank's span before, duration and waiting, in units of
    ``unit`` seconds. Whole numbers compress best, and a unit is a small part of the step.
    """
    spans = [span for rank in ranks for span in rank]
    unit = max((span.end for span in spans), default=0.0) / _UNITS or 1.0
    gaps, lasts = [], []
    for rank in ranks:
        before = 0
        for span in rank:
            begin, end = round(span.begin / unit), round(span.end / unit)
            gaps.append(begin - before)
            lasts.append(end - begin)
            before = end
    return {
        "phase": timeline.phase,
        "step": timeline.step,
        "unit": unit,
        "counts": numbers.put(len(rank) for rank in ranks),
        "kinds": numbers.put(phases.setdefault(span.phase, len(phases)) for span in spans),
        "gaps": numbers.put(gaps),
        "lasts": numbers.put(lasts),
        "waits": numbers.put(round((span.end - span.begin - span.busy) / unit) for span in spans),
    }
