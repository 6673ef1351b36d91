"""How good the cells are that successive halving ends with: whole trials of four cells of its grid, five seeds each.

python -m tests.slurm.halving_cells [--steps 270] [--seeds 5]

The cells are those with the middle learning rate; the others end far below. The spread is that from seed to seed,
pooled over the cells.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from rlhpc.config import yaml12
from rlhpc.launch.studies.study_folder import StudyFolder
from rlhpc.launch.studies.trials_table import read_table
from tests.slurm.cluster import Cluster
from tests.slurm.halving import SPACE, base, rlhpc, warmed_up
from tests.slurm.settings import Settings

_LONGEST_SECONDS = 7200.0


def whole_trials(cluster: Cluster, folder: Path, weights: Path, steps: int, seeds: int) -> dict[str, list[float]]:
    """The objective of each cell by seed."""
    rates = SPACE["actor.optimizer.learning_rate"]["choices"]
    space: dict[str, Any] = {
        **SPACE,
        "actor.optimizer.learning_rate": {"choices": [rates[1]]},
        "seed": {"choices": [*range(seeds)]},
    }
    settings = {
        **{"name": "cells", "base": str(base(folder, weights, 0, steps)), "seed": 0, "space": space},
        **{"folder": str(folder / "cells"), "sampler": {"name": "GridSampler"}, "retries": 1},
        "budget": {"trials": 4 * seeds, "at_once": 2},
        "objective": {"metric": "validation/reward_mean", "last": 2},
    }
    file = folder / "cells.yaml"
    file.write_text(yaml12.dump(settings))
    rlhpc(cluster, folder, "study", "run", str(file))
    deadline = time.monotonic() + _LONGEST_SECONDS
    while cluster.run("squeue -h").stdout.split() and time.monotonic() < deadline:
        time.sleep(5)
    found = defaultdict(list)
    for row in read_table(StudyFolder(folder / "cells")).trials:
        values = {key.rpartition(".")[2]: value for key, value in row.values.items() if key != "seed"}
        if row.value is not None:
            found[", ".join(f"{key} {value}" for key, value in values.items())].append(row.value)
        print(f"  {row.number:2} {row.state:9} {row.value} {row.values} {row.why}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=270)
    parser.add_argument("--seeds", type=int, default=5)
    asked = parser.parse_args()
    if asked.seeds < 2:
        parser.error("a spread needs two seeds")
    folder = Path(tempfile.mkdtemp(prefix="cells-", dir="/tmp"))
    weights = warmed_up(folder)
    with Cluster.up(Settings(nodes=2)) as cluster:
        cells = whole_trials(cluster, folder, weights, asked.steps, asked.seeds)
    spread = statistics.fmean(statistics.variance(values) for values in cells.values()) ** 0.5
    best = max(map(statistics.fmean, cells.values()))
    print("| cell | mean | lowest | highest | below the best, in spreads |\n| --- | --- | --- | --- | --- |")
    for cell, values in cells.items():
        mean = statistics.fmean(values)
        print(f"| {cell} | {mean:.4f} | {min(values):.4f} | {max(values):.4f} | {(best - mean) / spread:.2f} |")
    print(f"spread from seed to seed: {spread:.4f}")


if __name__ == "__main__":
    main()
