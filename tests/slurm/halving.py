"""What successive halving costs and finds: studies of a grid of 12 settings of the demo's task on a real Slurm.

python -m tests.slurm.halving [--studies 3] [--steps 270]

Each study has another seed. The cost of the whole grid is computed from the start and step times of the same study.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rlhpc.config import yaml12
from rlhpc.core import attempts
from rlhpc.core.folder import RunFolder
from rlhpc.core.records import number, read_records
from rlhpc.launch.studies.study_folder import StudyFolder
from rlhpc.launch.studies.trials_table import StudyTable, read_table
from tests.helpers.runs import ROOT
from tests.slurm.cluster import Cluster
from tests.slurm.settings import Settings

SPACE = {
    "actor.optimizer.learning_rate": {"choices": [1e-5, 2e-4, 3e-3]},
    "algorithm.clip_high": {"choices": [0.1, 0.28]},
    "rollout.temperature": {"choices": [0.7, 1.0]},
}
_LONGEST_SECONDS = 7200.0


def rlhpc(cluster: Cluster | None, folder: Path, *words: str) -> str:
    """A command of the toolkit, on the cluster's login node if there is one."""
    command = [sys.executable, "-m", "rlhpc.cli.main", *words]
    environ = {"PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(folder / "state"), "COLUMNS": "200"}
    if cluster is not None:
        done = cluster.run(command, env=environ, check=True)
        return done.stdout + done.stderr
    subprocess.run(command, env={**environ, "PATH": "/usr/bin:/bin"}, cwd=folder, check=True, capture_output=True)
    return ""


def warmed_up(folder: Path) -> Path:
    """Weights after the demo's supervised warm-up, which trials begin with."""
    changes = [f"run_dir={folder / 'warm'}", f"prepare.arguments.folder={folder / 'inputs'}"]
    changes += [f"data.train=[{folder / 'inputs' / 'train.parquet'}]", f"sft.data=[{folder / 'inputs' / 'sft.jsonl'}]"]
    changes += [
        f"data.validation=[{folder / 'inputs' / 'validation.jsonl'}]",
        f"model.path={folder / 'inputs' / 'model'}",
    ]
    rlhpc(None, folder, "run", str(ROOT / "configs" / "demo.yaml"), *changes, "train.steps=0", "checkpoint.export=hf")
    (found,) = (folder / "warm").glob("**/config.json")
    return found.parent


def base(folder: Path, weights: Path, seed: int, steps: int) -> Path:
    """The configuration that trials differ from: one rank, without a warm-up of its own."""
    config: dict[str, Any] = yaml12.parse((ROOT / "configs" / "demo.yaml").read_text(), "demo")
    for key in ("prepare", "sft"):
        del config[key]
    inputs = folder / "inputs"
    config |= {"model": {"path": str(weights), "dtype": "float32"}, "seed": seed, "resources": {"ranks_per_node": 1}}
    config["data"] |= {"train": [str(inputs / "train.parquet")], "validation": [str(inputs / "validation.jsonl")]}
    config["train"] |= {"prompts_per_step": 32, "steps": steps}
    config["validation"] = {"every": 10, "max_prompts": 256}
    config["checkpoint"] = {"every": 0}
    config["slurm"] = {"nodes": 1, "gpus_per_node": 0, "time": 60, "cpus_per_rank": 1}
    file = folder / f"base-{seed}.yaml"
    file.write_text(yaml12.dump(config))
    return file


def study(cluster: Cluster, folder: Path, weights: Path, steps: int, seed: int) -> StudyFolder:
    """Runs a study to its end. The pruner decides at a 27th of the steps, a ninth and a third."""
    pruner = {"name": "SuccessiveHalvingPruner", "arguments": {"min_resource": steps // 27, "reduction_factor": 3}}
    settings = {
        **{"name": f"halving-{seed}", "base": str(base(folder, weights, seed, steps)), "seed": seed, "space": SPACE},
        **{"folder": str(folder / f"study-{seed}"), "sampler": {"name": "GridSampler"}, "retries": 0},
        **{"pruner": pruner, "budget": {"trials": 12, "at_once": 2}},
        "objective": {"metric": "validation/reward_mean", "last": 2},
    }
    file = folder / f"study-{seed}.yaml"
    file.write_text(yaml12.dump(settings))
    rlhpc(cluster, folder, "study", "run", str(file))
    deadline = time.monotonic() + _LONGEST_SECONDS
    while cluster.run("squeue -h").stdout.split() and time.monotonic() < deadline:
        time.sleep(2)
    return StudyFolder(folder / f"study-{seed}")


def times_of(run: RunFolder) -> list[float]:
    """Beginning of a trial, and the times of its steps."""
    (attempt,) = [attempts.read_attempt(folder) for folder in attempts.folders(run)]
    assert attempt is not None
    return [attempt.started, *(number(record["time"]) or 0.0 for record in read_records(run.metrics) if record["step"])]


def row(table: StudyTable, folder: StudyFolder, steps: int) -> str:
    """What a study has cost and found."""
    trials = [times_of(folder.trial(each.number)) for each in table.trials]
    start = statistics.fmean(times[1] - times[0] for times in trials)
    taken = sum(len(times) - 1 for times in trials)
    step = sum(times[-1] - times[1] for times in trials) / (taken - len(trials))
    spent = sum(each.rank_hours for each in table.trials) * 3600
    grid = len(trials) * (start + (steps - 1) * step)
    assert table.best is not None
    best = table.trials[table.best]
    return (
        f"{table.name}: starts of {start:.1f} s, {step:.2f} s a step (a whole trial {(steps - 1) * step / start:.1f} "
        f"starts); {taken / (len(trials) * steps):.1%} of the steps, {spent:.0f} of {grid:.0f} node-seconds "
        f"({spent / grid:.1%}); best {best.values} with {best.value:.3f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--studies", type=int, default=3)
    parser.add_argument("--steps", type=int, default=270)
    asked = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="halving-", dir="/tmp"))
    weights = warmed_up(folder)
    cluster = Cluster.up(Settings(nodes=2))
    try:
        for seed in range(asked.studies):
            found = study(cluster, folder, weights, asked.steps, seed)
            table = read_table(found)
            print(row(table, found, asked.steps), flush=True)
            for each in table.trials:
                print(f"  {each.number:2} {each.state:9} {each.value} {each.values} {each.why}", flush=True)
    finally:
        cluster.down()


if __name__ == "__main__":
    main()
