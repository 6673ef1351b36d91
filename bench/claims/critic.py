"""Memory of a rank with GRPO over that with PPO, which has a critic."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml

from bench.claims.common import ROOT, done, model_of, one_thread
from bench.grpo_step import Plan, rlhpc_config
from bench.workload import KL_COEFFICIENT


def main() -> None:
    one_thread()
    found = {}
    with model_of("30m") as (workload, model), tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = [
            {"data_source": "bench", "prompt": prompt, "reward_model": {"style": "rule", "ground_truth": ""}}
            for prompt in workload.prompts(8)
        ]
        prompts = folder / "prompts.jsonl"
        prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
        plan = Plan(folder, {}, processes=1, threads=1, steps=1, warmup=0)
        for algorithm in ("grpo", "ppo"):
            config = rlhpc_config(workload, plan, model, prompts)
            config["algorithm"] = {"name": algorithm, "kl": {"coefficient": KL_COEFFICIENT, "estimator": "k3"}}
            file, run = folder / f"{algorithm}.yaml", folder / algorithm
            file.write_text(yaml.safe_dump(config))
            command = [sys.executable, "-m", "rlhpc.cli.main", "run", str(file), "--run-dir", str(run)]
            subprocess.run(command, cwd=ROOT, check=True, stdout=sys.stderr)
            (record,) = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
            found[algorithm] = record["memory/cpu_gib_max"]
    parameters = 32.0e6
    critic = (found["ppo"] - found["grpo"]) * 2**30 / parameters
    done(
        "memory without a critic (GRPO over PPO)",
        "less, no figure",
        f"**{found['grpo']:.2f}** and {found['ppo']:.2f} GiB of a rank's process: {critic:.0f} bytes a parameter of"
        " the critic",
        "32M parameters in float32 with a reference; weights, gradients and moments of a critic are 16 bytes",
    )


if __name__ == "__main__":
    main()
