"""Reads JSON lines, such as metrics.jsonl, and tolerates malformed ones."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

Record = dict[str, Any]
# Metrics of speed, waits, memory, devices and cost begin so: they differ when a step is repeated, all others are equal.
MEASURED = (
    "perf/",
    "memory/",
    "gpu/",
    "cost/",
    "observe/",
    "trainers/",
    "engines/",
    "engine/",
    "judges/",
    "weight_sync/",
    "rollout/queued_",
    # How responses were dealt depends on when tools answered.
    "rollout/waiting_",
    "rollout/moved_",
    "rollout/turns_",
)


def parse_records(data: bytes) -> list[Record]:
    """JSON objects in the complete lines, without malformed lines such as one that a crash cut short."""
    found = []
    for line in data[: data.rfind(b"\n") + 1].split(b"\n"):
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):  # bytes that are not UTF-8 and numbers of thousands of digits, too
            continue
        if isinstance(value, dict):
            found.append(value)
    return found


def is_step(record: Mapping[str, Any]) -> bool:
    """True if the record names its phase and step."""
    return isinstance(record.get("phase"), str) and type(record.get("step")) is int


def repeatable(record: Mapping[str, Any]) -> Record:
    """Fields that are equal in the records of a step that is repeated from a checkpoint."""
    return {name: value for name, value in record.items() if name != "time" and not name.startswith(MEASURED)}


def number(value: object) -> float | None:
    """The value as a float, which may be infinite or NaN; None for anything that is not a number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf
