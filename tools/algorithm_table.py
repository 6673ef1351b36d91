"""Runs the demo's task with every algorithm and several seeds, and rewrites the table in docs/algorithms.md.

    python -m tools.algorithm_table [NAME ...] [--seeds 0 1 2]

Default: all of configs/algorithms. Results are stored in docs/measurements/algorithms.json, so that a single algorithm
can be run again. A seed that misses stays in the table, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlhpc.core.files import write_atomic
from tools.demo_table import LEAST_AFTER_GRPO, ROOT, SEEDS, Result, run_demo
from tools.markers import rewrite

CONFIGS = ROOT / "configs" / "algorithms"
RESULTS = ROOT / "docs" / "measurements" / "algorithms.json"
MARKER = "algorithm-table"

Results = dict[str, dict[str, dict[str, Any]]]  # by algorithm, then seed


def table(stored: Results) -> str:
    """Markdown with a row per algorithm: accuracy before and after RL over its seeds."""
    rows = ["| algorithm | after the warm-up | after RL | seeds | RL steps |", "| --- | --- | --- | --- | --- |"]
    for name, results in sorted(stored.items()):
        before, after = ([result[when] for result in results.values()] for when in ("before", "after"))
        missed = "" if min(after) >= LEAST_AFTER_GRPO else " (missed)"
        steps = ", ".join(map(str, sorted({result["steps"] for result in results.values()})))
        rows.append(f"| `{name}` | {_range(before)} | {_range(after)}{missed} | {len(results)} | {steps} |")
    return "\n".join(rows) + "\n"


def _range(values: Sequence[float]) -> str:
    """Lowest and highest of several fractions."""
    return "-".join(f"{value:.1%}" for value in sorted({min(values), max(values)}))


def entry(result: Result) -> dict[str, Any]:
    """Stored figures of a run."""
    return {
        "before": round(result.after_warm_up, 4),
        "after": round(result.after_grpo, 4),
        "steps": result.steps,
        "seconds": round(result.seconds),
    }


def main() -> int:
    known = sorted(file.stem for file in CONFIGS.glob("*.yaml"))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", choices=[*known, []], help=", ".join(known))
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    options = parser.parse_args()
    stored: Results = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    base = Path("runs") / f"algorithms-{time.strftime('%Y%m%d-%H%M%S')}"
    for name in options.names or known:
        for seed in options.seeds:
            result = run_demo(seed, base / name / f"seed-{seed}", CONFIGS / f"{name}.yaml")
            stored.setdefault(name, {})[str(seed)] = entry(result)
            write_atomic(RESULTS, json.dumps(stored, indent=1, sort_keys=True) + "\n")
            rewrite(ROOT / "docs" / "algorithms.md", MARKER, table(stored))
    missed = [
        f"{name} {seed}" for name, of in stored.items() for seed, r in of.items() if r["after"] < LEAST_AFTER_GRPO
    ]
    if missed:
        print(f"missed {LEAST_AFTER_GRPO}: {', '.join(missed)}", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
