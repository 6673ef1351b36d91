"""Runs the demo with several seeds and keeps the series of its metrics as golden files of the alerts' tests.

    python -m tools.record_series demo|busy [SEED ...]

``busy``: beside other work on this machine, whose effects on speed the rules on throughput and stragglers must bear.
"""

from __future__ import annotations

import gzip
import json
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from rlhpc.core.records import MetricsFile, Record, number
from tools.demo_table import SEEDS, run_demo

SERIES = Path(__file__).parents[1] / "tests" / "golden" / "series"
_DIGITS = 6  # significant ones
# Metrics that rules are on, and those of the progress line.
_NAMES = frozenset(
    (
        "loss", "grad_norm", "skipped_updates", "entropy", "kl", "logprob_diff_mean", "reward/mean",
        "reward/max", "reward/min", "advantage/zero_fraction", "response/length_mean", "response/truncated_fraction",
        "validation/reward_mean", "perf/step_seconds", "perf/tokens_per_second", "perf/straggler_rank",
        "perf/straggler_ratio", "memory/cpu_gib_max",
    )
)  # fmt: skip


def packed(records: Iterable[Record]) -> bytes:
    """The records' numbers and phases as compressed JSON lines, equal for equal records."""
    lines = [json.dumps(_rounded(record)) for record in records]
    return gzip.compress("".join(line + "\n" for line in lines).encode(), mtime=0)


def _rounded(record: Record) -> Record:
    found: Record = {}
    for name, value in record.items():
        numeric = number(value)
        if name in ("phase", "step", "total_steps"):
            found[name] = value
        elif name == "time" and numeric is not None:
            found[name] = round(numeric, 3)
        elif name in _NAMES and numeric is not None:
            found[name] = float(f"{numeric:.{_DIGITS}g}")
    return found


def main(kind: str, seeds: list[int]) -> None:
    base = Path("runs") / f"series-{time.strftime('%Y%m%d-%H%M%S')}"
    SERIES.mkdir(parents=True, exist_ok=True)
    for seed in seeds:
        run_demo(seed, base / f"seed-{seed}")
        records = MetricsFile(base / f"seed-{seed}" / "run" / "metrics.jsonl").steps()
        (SERIES / f"{kind}-seed-{seed}.jsonl.gz").write_bytes(packed(records))


if __name__ == "__main__":
    main(sys.argv[1], [int(seed) for seed in sys.argv[2:]] or list(SEEDS))
