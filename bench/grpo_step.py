"""A complete GRPO step of rlhpc vs. TRL's GRPOTrainer: same machine, cores, model, prompts and response lengths.

    make bench-env
    python -m bench.grpo_step            # both workloads, alternating TRL and rlhpc
    python -m bench.grpo_step tiny --only rlhpc

Both systems use two cores as two processes of one thread, the faster setup for TRL too. A step is weight sync (rlhpc
only; TRL generates with the trained module itself), rollout, reference log-probs, loss and update.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from bench.workload import KL_COEFFICIENT, LEARNING_RATE, SEED, WORKLOADS, Workload, write_prompts

ROOT = Path(__file__).resolve().parent.parent
SYSTEMS = ("trl", "rlhpc")
PARTS = ("generate_seconds", "log_probs_seconds", "update_seconds")
# rlhpc's metrics of each part; weight sync counts as generation.
RLHPC_PARTS = {
    "generate_seconds": ("perf/weight_sync_seconds", "perf/rollout_seconds"),
    "log_probs_seconds": ("perf/prepare_seconds", "perf/log_probs_seconds"),
    "update_seconds": ("perf/update_seconds",),
}
# Sequences (TRL) and tokens (rlhpc) per microbatch: the fastest of those tried.
TRL_MICRO_BATCH = {"tiny": 32, "30m": 4}
RLHPC_MICRO_BATCH = {"tiny": 2048, "30m": 2048}


@dataclass(frozen=True)
class Plan:
    """Size of a benchmark: folder, environments, processes, threads and steps."""

    folder: Path
    python: dict[str, str]  # by system
    processes: int
    threads: int
    steps: int
    warmup: int


def call(command: Sequence[str], threads: int, log: Path) -> str:
    """Run a program from the repository root and return its standard output; all output goes to ``log``."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    log.write_text(done.stdout + done.stderr, encoding="utf-8")
    if done.returncode:
        tail = "\n".join(log.read_text(encoding="utf-8").splitlines()[-20:])
        sys.exit(f"{' '.join(command)}\nended with code {done.returncode}:\n{tail}\nFull log: {log}")
    return done.stdout


def make_inputs(workload: Workload, plan: Plan) -> tuple[Path, Path]:
    """Make the model folder and the prompt file with rlhpc's columns; returns their paths."""
    model, prompts = plan.folder / "models" / workload.name, plan.folder / f"{workload.name}.jsonl"
    if not (model / "model.safetensors").exists():
        call(
            [plan.python["rlhpc"], "-m", "bench.models", workload.name, str(model)],
            plan.threads,
            plan.folder / "models.log",
        )
    write_prompts(prompts, workload.prompts(workload.prompts_per_step * (plan.warmup + plan.steps)))
    return model, prompts


def run_trl(workload: Workload, plan: Plan, model: Path, log: Path) -> dict[str, Any]:
    """Run TRL; returns the document that bench.trl_step prints."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={plan.processes}"]
    command = [
        plan.python["trl"],
        *(launcher if plan.processes > 1 else []),
        "-m",
        "bench.trl_step",
        workload.name,
        str(model),
    ]
    command += [f"--steps={plan.steps}", f"--warmup={plan.warmup}", f"--threads={plan.threads}"]
    command += [f"--micro-batch={TRL_MICRO_BATCH[workload.name]}"]
    lines = call(command, plan.threads, log).splitlines()
    return json.loads(next(line for line in lines if line.startswith('{"system"')))


def rlhpc_config(workload: Workload, plan: Plan, model: Path, prompts: Path) -> dict[str, Any]:
    """Config with a step like TRL's: one update on all samples, token-mean loss, KL to a reference."""
    return {
        "name": f"bench-{workload.name}",
        "seed": SEED,
        "model": {"path": str(model), "dtype": "float32"},
        "resources": {"ranks_per_node": plan.processes, "threads_per_rank": plan.threads},
        "data": {
            "train": [str(prompts)],
            "max_prompt_tokens": workload.prompt_tokens[1],
            "shuffle": False,
            "chat_template": False,
        },
        "actor": {"optimizer": {"learning_rate": LEARNING_RATE, "weight_decay": 0.0}},
        "rewards": [{"function": "bench.workload:score"}],
        "rollout": {
            "samples_per_prompt": workload.samples_per_prompt,
            "max_response_tokens": workload.max_response,
            "temperature": 1.0,
        },
        "algorithm": {"name": "grpo", "kl": {"coefficient": KL_COEFFICIENT, "estimator": "k3"}},
        "train": {
            "steps": plan.warmup + plan.steps,
            "prompts_per_step": workload.prompts_per_step,
            "tokens_per_microbatch": RLHPC_MICRO_BATCH[workload.name],
        },
        "checkpoint": {"every": 0},
        "observe": {"tensorboard": False, "samples": 0},
    }


def run_rlhpc(
    workload: Workload, plan: Plan, model: Path, prompts: Path, log: Path, overrides: Sequence[str] = ()
) -> dict[str, Any]:
    """Run rlhpc with ``overrides`` of its configuration; returns figures from its metrics."""
    config, folder = log.with_suffix(".yaml"), log.with_suffix("")
    config.write_text(yaml.safe_dump(rlhpc_config(workload, plan, model, prompts), sort_keys=False), encoding="utf-8")
    command = ["-m", "rlhpc.cli.main", "run", str(config), *overrides, "--run-dir", str(folder)]
    call([plan.python["rlhpc"], *command], plan.threads, log)
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    records = [record for record in records if record["phase"] == "rl" and record["step"] > plan.warmup]
    steps = [
        {
            "seconds": record["perf/step_seconds"],
            "completion_tokens": int(record["rollout/completion_tokens"]),
            **{part: sum(record.get(key, 0.0) for key in keys) for part, keys in RLHPC_PARTS.items()},
        }
        for record in records
    ]
    return {
        "system": "rlhpc",
        "model": workload.name,
        "processes": plan.processes,
        "threads": plan.threads,
        "steps": steps,
    }


def summarise(results: Sequence[dict[str, Any]]) -> str:
    """One line per workload and system: medians over all timed steps, and the ratio of rlhpc's throughput to TRL's."""
    lines = ["model  system  steps  tokens/step  step s  generate s  log-probs s  update s  tokens/s  ratio"]
    for name in dict.fromkeys(result["model"] for result in results):
        base = None
        for system in SYSTEMS:
            steps = [s for r in results if (r["model"], r["system"]) == (name, system) for s in r["steps"]]
            if not steps:
                continue
            rate = statistics.median(step["completion_tokens"] / step["seconds"] for step in steps)
            base = base or rate
            mid = {
                key: statistics.median(step[key] for step in steps) for key in ("completion_tokens", "seconds", *PARTS)
            }
            lines.append(
                f"{name:5}  {system:6}  {len(steps):5}  {mid['completion_tokens']:11.0f}  {mid['seconds']:6.2f}  "
                f"{mid['generate_seconds']:10.2f}  {mid['log_probs_seconds']:11.2f}  {mid['update_seconds']:8.2f}  "
                f"{rate:8.0f}  {rate / base:5.2f}"
            )
    return "\n".join(lines)


def take_turns(workload: Workload, plan: Plan, systems: Sequence[str], rounds: int) -> Iterator[dict[str, Any]]:
    """Results of all runs, with the systems in turn in every round."""
    model, prompts = make_inputs(workload, plan)
    for turn in range(rounds):
        for system in systems:
            load, log = os.getloadavg()[0], plan.folder / f"{workload.name}-{turn}-{system}.log"
            if system == "trl":
                result = run_trl(workload, plan, model, log)
            else:
                result = run_rlhpc(workload, plan, model, prompts, log)
            rates = [round(step["completion_tokens"] / step["seconds"]) for step in result["steps"]]
            print(f"{workload.name} turn {turn} {system}: tokens/s {rates}, load before {load:.1f}", flush=True)
            yield {**result, "turn": turn, "load_before": load}


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", help=f"of {', '.join(WORKLOADS)}; default: all")
    parser.add_argument("--only", choices=SYSTEMS, help="run only one system")
    parser.add_argument("--rounds", type=int, default=2, help="rounds, each with one run per system")
    parser.add_argument("--steps", type=int, default=3, help="timed steps per run")
    parser.add_argument("--warmup", type=int, default=1, help="untimed steps before them")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="threads per process")
    parser.add_argument("--python", default=sys.executable, help="Python with rlhpc")
    parser.add_argument("--trl-python", default=str(ROOT / ".venv-bench/bin/python"), help="Python with TRL")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / time.strftime("bench-%Y%m%d-%H%M%S"))
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    python = {"rlhpc": options.python, "trl": options.trl_python}
    plan = Plan(options.folder.resolve(), python, options.processes, options.threads, options.steps, options.warmup)
    plan.folder.mkdir(parents=True, exist_ok=True)
    results: list[dict[str, Any]] = []
    for name in options.workloads or WORKLOADS:
        for result in take_turns(WORKLOADS[name], plan, [options.only] if options.only else SYSTEMS, options.rounds):
            results.append(result)
            (plan.folder / "results.json").write_text(json.dumps(results, indent=1), encoding="utf-8")
    print(summarise(results))


if __name__ == "__main__":
    main()
