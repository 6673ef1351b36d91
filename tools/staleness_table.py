"""Runs the demo with engines on ranks of their own, by staleness, and writes a table of held-out accuracy.

    python -m tools.staleness_table [NAME ...] [--seeds 0 1 2]

NAME: a maximum staleness (0, 1, 2, 4), with importance weights of the older tokens (TIS); 4-uncorrected: without. Each
finished run is stored in docs/measurements/staleness.json. A seed that misses stays in the table, and the exit code is
1 if one with importance weights has missed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from rlhpc.core.files import write_atomic
from rlhpc.core.folder import RunFolder
from rlhpc.core.records import MetricsFile
from tools.demo_table import CONFIG, ROOT, SEEDS, accuracies, run_demo

RESULTS = ROOT / "docs" / "measurements" / "staleness.json"
LEAST = 0.95
UNCORRECTED = "4-uncorrected"
NAMES = ("0", "1", "2", "4", UNCORRECTED)

# Trainers are slow in virtual time, so that engines are as far ahead as the bound allows.
COSTS = {"step_seconds": 0.01, "sequence_seconds": 0.0, "train_seconds": 1.0}

Results = dict[str, dict[str, dict[str, Any]]]  # by name, then seed


def config_of(name: str) -> dict[str, Any]:
    """The demo's config with a trainer and an engine."""
    config: dict[str, Any] = yaml.safe_load(CONFIG.read_text())
    config |= {"placement": "separate", "asynchrony": {"max_staleness": int(name.split("-")[0]), "costs": COSTS}}
    config["rollout"]["ranks"] = 1
    if name != UNCORRECTED:
        config["algorithm"]["rollout_correction"] = {"method": "truncate"}
    return config


def entry(name: str, seed: int, folder: Path) -> dict[str, Any]:
    """Stored figures of a run."""
    folder.mkdir(parents=True)
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(config_of(name), sort_keys=False))
    result = run_demo(seed, folder, file)
    steps = [r for r in MetricsFile(RunFolder(folder / "run").metrics).steps() if r["phase"] == "rl" and r["step"]]
    return {
        **{key: round(value, 4) for key, value in asdict(result).items() if key != "seed"},
        "staleness_max": max(step["sampling/staleness_max"] for step in steps),
        "staleness_mean": round(sum(step["sampling/staleness_mean"] for step in steps) / len(steps), 2),
    }


def table(stored: Results) -> str:
    """Markdown with a row per staleness and a column per seed."""
    seeds = sorted({seed for results in stored.values() for seed in results}, key=int)
    head = ["staleness", "importance weights", *(f"seed {seed}" for seed in seeds), "observed: mean", "maximum"]
    rows = [f"| {' | '.join(head)} |", "| --- |" + " --- |" * (len(head) - 1)]
    for name in NAMES:
        results = stored.get(name, {})
        cells = [_cell(results.get(seed)) for seed in seeds]
        mean = f"{sum(r['staleness_mean'] for r in results.values()) / len(results):.2f}" if results else ""
        most = f"{max(r['staleness_max'] for r in results.values()):.0f}" if results else ""
        weights = "no" if name == UNCORRECTED else "yes"
        rows.append(f"| {name.split('-')[0]} | {weights} | {' | '.join(cells)} | {mean} | {most} |")
    return "\n".join(rows) + "\n"


def _cell(result: dict[str, Any] | None) -> str:
    if result is None:
        return "not run"
    return accuracies(result["after_warm_up"], result["after_grpo"], LEAST)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", choices=[*NAMES, []], help=", ".join(NAMES))
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    options = parser.parse_args()
    stored: Results = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    base = ROOT / "runs" / f"staleness-{time.strftime('%Y%m%d-%H%M%S')}"
    for name in options.names or NAMES:
        for seed in options.seeds:
            stored.setdefault(name, {})[str(seed)] = entry(name, seed, base / name / f"seed-{seed}")
            write_atomic(RESULTS, json.dumps(stored, indent=1, sort_keys=True) + "\n")
            print(table(stored), flush=True)
    missed = [
        f"{name} {seed}"
        for name, of in stored.items()
        for seed, result in of.items()
        if name != UNCORRECTED and result["after_grpo"] < LEAST
    ]
    if missed:
        print(f"missed {LEAST}: {', '.join(missed)}", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
