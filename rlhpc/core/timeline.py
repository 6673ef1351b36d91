"""Timelines of the newest steps in timeline.jsonl: when each rank was in which phase, and how long it waited there."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhpc.core.records import Record, is_step, number, parse_records
from rlhpc.core.spans import Span
from rlhpc.core.storage import patiently


@dataclass(frozen=True)
class StepTimeline:
    """A step of the phase ``sft`` or ``rl``, recorded at ``time``. ``ranks``: the spans of each rank, in seconds since
    the step began there."""

    phase: str
    step: int
    time: float
    ranks: tuple[tuple[Span, ...], ...]

    def line(self) -> str:
        """Its line in the file, with a resolution of 0.1 ms."""
        spans = [[[s.phase, *(round(t, 4) for t in (s.begin, s.end, s.wait))] for s in rank] for rank in self.ranks]
        record = {"phase": self.phase, "step": self.step, "time": round(self.time, 3), "spans": spans}
        return json.dumps(record, separators=(",", ":")) + "\n"


def read_timelines(path: Path) -> list[StepTimeline]:
    """Timelines in the file, each step once, in the order of their last records; none if the file is absent."""
    try:
        data = patiently(path.read_bytes, path)
    except FileNotFoundError:
        return []
    found: dict[tuple[str, int], StepTimeline] = {}
    for record in filter(is_step, parse_records(data)):
        if (timeline := _timeline(record)) is not None:
            key = timeline.phase, timeline.step
            found.pop(key, None)
            found[key] = timeline
    return list(found.values())


def newest_timelines(path: Path) -> Iterator[StepTimeline]:
    """Yields the same, the newest first. Parses a line only when it is asked for: a line of 1,024 ranks is long."""
    try:
        lines = patiently(path.read_bytes, path).split(b"\n")[:-1]
    except FileNotFoundError:
        return
    seen: set[tuple[str, int]] = set()
    for line in reversed(lines):
        for record in filter(is_step, parse_records(line + b"\n")):
            timeline = _timeline(record)
            if timeline is not None and (timeline.phase, timeline.step) not in seen:
                seen.add((timeline.phase, timeline.step))
                yield timeline


def _timeline(record: Record) -> StepTimeline | None:
    """None for a record that lacks parts or has others."""
    time, ranks = number(record.get("time")), record.get("spans")
    if time is None or not isinstance(ranks, list) or not all(isinstance(rank, list) for rank in ranks):
        return None
    spans = [[_span(entry) for entry in rank] for rank in ranks]
    if any(span is None for rank in spans for span in rank):
        return None
    whole = tuple(tuple(span for span in rank if span is not None) for rank in spans)
    return StepTimeline(record["phase"], record["step"], time, whole)


def _span(entry: Any) -> Span | None:
    if not isinstance(entry, Sequence) or len(entry) != 4 or not isinstance(entry[0], str):
        return None
    times = [number(value) for value in entry[1:]]
    known = [value for value in times if value is not None]
    return Span(entry[0], *known) if len(known) == 3 else None
