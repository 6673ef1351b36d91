"""Speculative decoding: CPU time of a token with guesses over that without, and that tokens are equal.

    python -m bench.speculative              # both models
    python -m bench.speculative tiny --rounds 7

Two tasks by n-grams: responses that repeat themselves (the head's weights are sharpened), and responses of which
nothing can be guessed, with guesses at every token (min_match 1). Two by a second model at every token: the
policy's first layer, and the policy itself. Each engine is a process of its own; they generate in turn, and the median
round counts.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.server import ROOT, Server, answer
from bench.workload import SEED, WORKLOADS, Workload

PROMPT, RESPONSE = 48, 128
SEQUENCES = {"tiny": 32, "30m": 8}
# One hash seed, so that processes can compare what they generated.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "PYTHONHASHSEED": "0"}
TOKENS = 20_000  # of the second task, at least


@dataclass(frozen=True)
class Task:
    """``sharp``: factor of the head's weights; ``guesses``: of ``rollout.speculative``; ``layers``: those of the policy
    that a second model has, None without one."""

    sharp: float
    guesses: dict[str, Any]
    layers: int | None = None


_SECOND = {"method": "draft_model", "tokens": 3, "min_acceptance": 0.0}
TASKS = {
    "repeats": Task(16.0, {}),
    "nothing right": Task(1.0, {"min_match": 1}),
    "first layer": Task(16.0, _SECOND, 1),
    "all right": Task(16.0, _SECOND, 1000),
}


def serve(workload: Workload, model: Path, task: Task, *, guesses: bool) -> None:
    """Measured process: builds, warms up, then generates one batch per line on standard input."""
    from safetensors.torch import load_file

    from rlhpc.api import Request
    from rlhpc.config.rollout import RolloutSection
    from rlhpc.models import read_model
    from rlhpc.rollout.vllm_arguments import ServedModel
    from rlhpc.rollout.vllm_engine import VllmEngine

    count = SEQUENCES[workload.name]
    own = dict(task.guesses) if guesses else None
    if own is not None and task.layers is not None:
        own["model"] = second_model(model, model.with_name("second"), task)
    section = RolloutSection(kv_cache_gib=0.5, max_num_seqs=count, speculative=own)
    engine = VllmEngine(ServedModel(model, read_model(model), "float32", PROMPT + RESPONSE), section)
    tensors = load_file(model / "model.safetensors")
    tensors["lm_head.weight"] *= task.sharp
    engine.wake_weights()
    engine.load_weights(iter(tensors.items()))
    engine.wake_cache()
    rng = random.Random(SEED)
    batches = max(1, TOKENS // (count * RESPONSE)) if task.sharp == 1.0 else 1
    requests = [
        Request(tuple(rng.randrange(3, workload.vocab) for _ in range(PROMPT)), seed, RESPONSE, 1.0)
        for seed in range(batches * count)
    ]
    engine.generate(requests[:2])
    answer({})
    for _ in sys.stdin:
        engine.load_weights(iter(tensors.items()))  # as each step of a run, which ends a pause
        engine.statistics()
        began, cpu = time.perf_counter(), time.process_time()
        found = engine.generate(requests)
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
        tokens = [token for completion in found for token in completion.tokens.tolist()]
        facts = {"seconds": seconds, "cpu": cpu, "tokens": len(tokens), "digest": hash(tuple(tokens))}
        answer(facts | engine.statistics())


def second_model(policy: Path, folder: Path, task: Task) -> Path:
    """Saves a model with the policy's first layers and its sharpened head to ``folder``."""
    from safetensors.torch import load_file, save_file

    fields = json.loads((policy / "config.json").read_text())
    count = fields["num_hidden_layers"] = min(task.layers or 0, fields["num_hidden_layers"])
    fields.pop("layer_types", None)  # one for each layer
    tensors = load_file(policy / "model.safetensors")
    tensors["lm_head.weight"] *= task.sharp
    layers = {name: int(found[1]) for name in tensors if (found := re.search(r"layers\.(\d+)\.", name))}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields))
    save_file({n: t for n, t in tensors.items() if layers.get(n, 0) < count}, folder / "model.safetensors")
    return folder


def measure(workload: Workload, model: Path, task: str, rounds: int) -> None:
    """Prints a row of the table."""
    found: dict[str, list[dict[str, Any]]] = {"plain": [], "guesses": []}
    with ExitStack() as stack:
        servers = {}
        for name in found:
            arguments = [workload.name, "--model", str(model), "--serve", task, "--with", name]
            servers[name] = Server("bench.speculative", arguments, ENVIRONMENT, model.with_name(f"{name}.log"))
            stack.callback(servers[name].close)
        for index in range(rounds):
            for name in sorted(found, reverse=bool(index % 2)):
                found[name].append(servers[name].run())
    assert len({facts["digest"] for runs in found.values() for facts in runs}) == 1, "guesses changed a token"
    cost = {name: statistics.median(run["cpu"] / run["tokens"] * 1e6 for run in runs) for name, runs in found.items()}
    rate = {name: statistics.median(run["tokens"] / run["seconds"] for run in runs) for name, runs in found.items()}
    facts = found["guesses"][-1]
    print(
        f"{workload.name:6}{task:15}{cost['plain']:10.0f}{cost['guesses']:10.0f}"
        f"{cost['plain'] / cost['guesses']:9.2f}{rate['guesses'] / rate['plain']:9.2f}"
        f"{facts.get('engine/guess_acceptance_mean', 0):12.3f}{facts.get('engine/accepted_length_mean', 1):9.2f}"
        f"{facts['engine/guesses_paused_mean']:9.2f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", choices=[[], *sorted(WORKLOADS)], help="default: all")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--serve", choices=TASKS, help=argparse.SUPPRESS)
    parser.add_argument("--with", dest="engine", help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    workloads = [WORKLOADS[name] for name in arguments.workloads or sorted(WORKLOADS, reverse=True)]
    if arguments.serve:
        serve(workloads[0], arguments.model, TASKS[arguments.serve], guesses=arguments.engine == "guesses")
        return
    print(f"{'model':6}{'task':15}{'µs plain':>10}{'guesses':>10}{'CPU':>9}{'rate':>9}{'accepted':>12}", end="")
    print(f"{'length':>9}{'paused':>9}")
    with tempfile.TemporaryDirectory(prefix="bench-speculative-") as name:
        for workload in workloads:
            model = Path(name) / workload.name
            subprocess.run([sys.executable, "-m", "bench.models", workload.name, str(model)], cwd=ROOT, check=True)
            for task in TASKS:
                measure(workload, model, task, arguments.rounds)


if __name__ == "__main__":
    main()
