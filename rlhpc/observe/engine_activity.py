"""Activity of engines on ranks of their own since the last step, as metrics and in a file for `rlhpc status`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rlhpc.core.files import write_atomic
from rlhpc.core.folder import AttemptFolder
from rlhpc.core.records import number
from rlhpc.core.storage import NONE

IDLE = ("weights", "engines", "tools", "rewards", "models", "trainers")  # what an engine can wait for
MOST_ENGINES = 4096  # in the file


@dataclass(frozen=True)
class EngineRow:
    """An engine in the newest step. ``rank``: the job's rank of its first one; ``idle``: share of its time in which it
    made no step; ``version``: of its weights."""

    engine: int
    rank: int
    idle: float
    tokens_per_second: float
    version: int


@dataclass(frozen=True)
class SidesStatus:
    """Both sides of a run in its newest step: idle shares, finished groups that wait, staleness, and every engine; with
    reshard.delta, bytes that the trainers sent for the weights that it began with, and would have sent in full."""

    step: int
    trainers_idle: float | None
    queued_groups: int | None
    staleness_max: int | None
    engines: tuple[EngineRow, ...]
    sent_bytes: int | None = None
    weights_bytes: int | None = None


class EngineActivity:
    """Activity of all engines since the last step. ``ranks``: the job's rank of each engine's first one."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self._ranks = tuple(ranks)
        self._versions = [0] * len(ranks)
        self._rows: tuple[EngineRow, ...] = ()
        self._begin()

    def _begin(self) -> None:
        self._seconds = [0.0] * len(self._ranks)
        self._tokens = [0] * len(self._ranks)
        self._idle: list[dict[str, float]] = [{} for _ in self._ranks]

    def add(self, engine: int, seconds: float, idle: Mapping[str, float], tokens: int, version: int) -> None:
        """Adds what an engine did in ``seconds``; ``idle``: seconds by what it waited for."""
        self._seconds[engine] += seconds
        self._tokens[engine] += tokens
        self._versions[engine] = version
        for what, waited in idle.items():
            self._idle[engine][what] = self._idle[engine].get(what, 0.0) + waited

    def metrics(self) -> dict[str, float]:
        """Metrics of the time since the last call. An engine that has reported nothing since has no part in them."""
        rows, shares = [], {what: list[float]() for what in IDLE}
        for engine, seconds in enumerate(self._seconds):
            if seconds <= 0:
                continue
            idle = self._idle[engine]
            share = min(1.0, sum(idle.values()) / seconds)
            rate = self._tokens[engine] / seconds
            rows.append(EngineRow(engine, self._ranks[engine], share, rate, self._versions[engine]))
            for what in IDLE:
                shares[what].append(min(1.0, idle.get(what, 0.0) / seconds))
        self._begin()
        if not rows:
            return {}
        self._rows = tuple(rows)
        most, slowest = max(rows, key=lambda row: row.idle), min(rows, key=lambda row: row.tokens_per_second)
        return {
            "engines/idle_fraction_mean": _mean([row.idle for row in rows]),
            "engines/idle_fraction_max": most.idle,
            "engines/idle_fraction_max_rank": float(most.rank),
            **{f"engines/idle_{what}_fraction": _mean(found) for what, found in shares.items()},
            "engines/tokens_per_second_mean": _mean([row.tokens_per_second for row in rows]),
            "engines/tokens_per_second_min": slowest.tokens_per_second,
            "engines/tokens_per_second_min_rank": float(slowest.rank),
        }

    def write(self, attempt: AttemptFolder, step: int, record: Mapping[str, Any]) -> None:
        """Replaces the attempt's file with the newest rows. ``record``: the step's metrics."""
        status = SidesStatus(
            step,
            number(record.get("trainers/idle_fraction")),
            _whole(record, "rollout/queued_groups"),
            _whole(record, "sampling/staleness_max"),
            self._rows[:MOST_ENGINES],
            *(_whole(record, f"weight_sync/{what}_bytes_sum") for what in ("sent", "weights")),
        )
        text = json.dumps(asdict(status), separators=(",", ":"))
        write_atomic(attempt.engines, text + "\n", NONE)


def read_sides(attempt: AttemptFolder) -> SidesStatus | None:
    """Both sides in the attempt's newest step; None without that file. Raises OSError if it cannot be read."""
    try:
        fields = json.loads(attempt.engines.read_text(encoding="utf-8"))
        rows = tuple(EngineRow(**row) for row in fields.pop("engines"))
        return SidesStatus(**fields, engines=rows)
    except (FileNotFoundError, ValueError, TypeError, KeyError, AttributeError):
        return None


def _whole(record: Mapping[str, Any], name: str) -> int | None:
    value = number(record.get(name))
    return None if value is None else int(value)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
