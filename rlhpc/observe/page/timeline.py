"""Phases and waits of every rank in the newest steps, as bars."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlhpc.core.records import is_step, number
from rlhpc.core.storage import patiently
from rlhpc.observe.page.packing import Numbers

Span = tuple[str, float, float, float]  # phase, begin, end, seconds of waiting
_UNITS = 20_000  # in a step


def pack_timeline(path: Path, numbers: Numbers, most_spans: int) -> dict[str, Any] | None:
    """Newest steps of timeline.jsonl with at most ``most_spans`` spans together; None without any."""
    steps: list[dict[str, Any]] = []
    phases: dict[str, int] = {}
    seen: set[tuple[str, int]] = set()
    left = most_spans
    for line in reversed(_lines(path)):
        record = _record(line)
        if record is None or (record["phase"], record["step"]) in seen:  # the last record of a repeated step counts
            continue
        seen.add((record["phase"], record["step"]))
        ranks = [list(_spans(spans)) for spans in record["spans"]]
        count = sum(map(len, ranks))
        if count > left:
            break
        left -= count
        steps.append(_packed(record, ranks, phases, numbers))
    return {"phases": list(phases), "steps": steps[::-1]} if steps else None


def _packed(
    record: dict[str, Any], ranks: list[list[Span]], phases: dict[str, int], numbers: Numbers
) -> dict[str, Any]:
    """Places of a step's spans: columns for all ranks, and the number of spans of each rank.

    ``gaps``, ``lasts`` and ``waits``: time since the end of the rank's span before, duration and waiting, in units of
    ``unit`` seconds. Whole numbers compress best, and a unit is a small part of the step.
    """
    spans = [span for rank in ranks for span in rank]
    unit = max((span[2] for span in spans), default=0.0) / _UNITS or 1.0
    begins, lasts, waits = [], [], []
    for rank in ranks:
        before = 0
        for _, begin, end, wait in rank:
            begins.append(round(begin / unit) - before)
            before = round(end / unit)
            lasts.append(before - round(begin / unit))
            waits.append(round(wait / unit))
    return {
        "phase": record["phase"],
        "step": record["step"],
        "unit": unit,
        "counts": numbers.put(len(rank) for rank in ranks),
        "kinds": numbers.put(phases.setdefault(span[0], len(phases)) for span in spans),
        "gaps": numbers.put(begins),
        "lasts": numbers.put(lasts),
        "waits": numbers.put(waits),
    }


def _lines(path: Path) -> list[bytes]:
    try:
        return patiently(path.read_bytes, path).split(b"\n")[:-1]
    except FileNotFoundError:
        return []


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    usable = isinstance(record, dict) and is_step(record) and isinstance(record.get("spans"), list)
    return record if usable else None


def _spans(spans: Any) -> Iterator[Span]:
    """Spans of a rank, without malformed ones."""
    for span in spans if isinstance(spans, list) else ():
        if isinstance(span, list) and len(span) >= 3 and isinstance(span[0], str):
            begin, end, wait = (number(value) for value in (*span[1:4], 0.0)[:3])
            if begin is not None and end is not None and 0 <= begin <= end < 1e9:
                yield span[0], begin, end, min(max(wait or 0.0, 0.0), end - begin)
