"""Series of metrics: recorded ones, and a healthy one to plant faults in."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhpc.core.records import Record
from rlhpc.observe.alerts.rules import Engine, Rule

SERIES = Path(__file__).parents[2] / "golden" / "series"
COLLAPSED = SERIES / "collapsed.jsonl.gz"
RECORDED = sorted({*SERIES.glob("*.jsonl.gz")} - {COLLAPSED})  # healthy ones
STEP_SECONDS = 60.0
HEALTHY = {
    "loss": 0.01,
    "grad_norm": 1.0,
    "entropy": 0.3,
    "kl": 0.2,
    "logprob_diff_mean": 0.01,
    "reward/mean": 0.6,
    "reward/max": 1.0,
    "reward/min": 0.0,
    "advantage/zero_fraction": 0.3,
    "response/length_mean": 200.0,
    "response/truncated_fraction": 0.1,
    "perf/tokens_per_second": 10_000.0,
    "skipped_updates": 0.0,
    "perf/straggler_rank": -1.0,
    "perf/straggler_ratio": 1.0,
    "memory/device_share_max": 0.9,
    "gpu/throttled_fraction_max": 0.0,
    "gpu/ecc_uncorrected_max": 0.0,
    "rollout/lost_engines": 0.0,
    "disk/free_gib": 1000.0,
    "checkpoint/gib": 40.0,
    "checkpoint/age_minutes": 30.0,
}


def recorded(file: Path) -> list[Record]:
    """Records of a golden file."""
    return [json.loads(line) for line in gzip.decompress(file.read_bytes()).splitlines()]


def healthy(steps: int, first: int = 1, **changes: Any) -> list[Record]:
    """Records of a healthy run, a step a minute, that vary by 5% from step to step; ``changes`` by name, __ for /."""
    changed = {name.replace("__", "/"): value for name, value in changes.items()}
    return [
        {"phase": "rl", "step": step, "time": 1e9 + STEP_SECONDS * step, **_varied(HEALTHY, step), **changed}
        for step in range(first, first + steps)
    ]


def fired(rules: Sequence[Rule], records: Sequence[Mapping[str, Any]]) -> list[tuple[str, int, str]]:
    """(rule, step, message) of all alerts."""
    return list(_fired(Engine(rules), records))


def _fired(engine: Engine, records: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, int, str]]:
    for record in records:
        for rule, message in engine.add(json.loads(json.dumps(record))):
            yield rule.name, record["step"], message


def _varied(values: Mapping[str, float], step: int) -> dict[str, float]:
    factor = (1.0, 1.05, 0.95)[step % 3]
    return {name: value * factor if name in _VARYING else value for name, value in values.items()}


_VARYING = ("entropy", "kl", "logprob_diff_mean", "reward/mean", "perf/tokens_per_second", "response/length_mean")
