"""Rollout tokens per second: rlhpc's engine after a weight sync vs. vLLM's ``LLM.generate``.

    python -m bench.rollout              # both workloads
    python -m bench.rollout tiny --rounds 7

Same machine, threads, model, prompts and response lengths. Each system is a separate process; they generate in turn,
and the median round counts. vLLM reads the weights from disk and runs
compiled (its default) and eager, with every option that makes it faster and that rlhpc's engine has too.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench.server import ROOT, Server, answer
from bench.workload import SEED, WORKLOADS, Workload

SYSTEMS = ("rlhpc", "rlhpc compiled", "vllm", "vllm eager")
CACHE_GIB = 0.5
Batch = list[tuple[tuple[int, ...], int]]  # prompt, response length
Generate = Callable[[], int]  # number of tokens


def make_batch(workload: Workload) -> Batch:
    """Requests of one step: groups per prompt, with response lengths sampled by the workload's hazard."""
    rng = random.Random(SEED)
    batch: Batch = []
    for _ in range(workload.prompts_per_step):
        prompt = tuple(rng.randrange(3, workload.vocab) for _ in range(rng.randint(*workload.prompt_tokens)))
        for _ in range(workload.samples_per_prompt):
            length = 1
            while length < workload.max_response and rng.random() > workload.hazard:
                length += 1
            batch.append((prompt, length))
    return batch


def start_rlhpc(model: Path, workload: Workload, batch: Batch, *, compiled: bool) -> tuple[Generate, dict[str, float]]:
    from safetensors.torch import load_file

    from rlhpc.api import Request
    from rlhpc.config.schema import RolloutSection
    from rlhpc.models import read_model
    from rlhpc.rollout.vllm_arguments import ServedModel
    from rlhpc.rollout.vllm_engine import VllmEngine

    section = RolloutSection(kv_cache_gib=CACHE_GIB, max_num_seqs=len(batch), compile=compiled)
    shape = read_model(model)
    engine = VllmEngine(ServedModel(model, shape, "float32", _context(workload)), section)
    tensors = load_file(model / "model.safetensors")
    requests = [
        Request(prompt, seed=seed, max_tokens=length, temperature=1.0) for seed, (prompt, length) in enumerate(batch)
    ]
    seconds = []
    for _ in range(4):  # as in training: sleep, wake and sync weights each step
        engine.wake_weights()
        began = time.perf_counter()
        engine.load_weights(iter(tensors.items()))
        seconds.append(time.perf_counter() - began)
        engine.wake_cache()
        engine.generate(requests[:4])
        engine.sleep()
    engine.wake_weights()
    engine.load_weights(iter(tensors.items()))
    engine.wake_cache()
    return lambda: sum(len(c.tokens) for c in engine.generate(requests)), {"weight_sync_seconds": min(seconds)}


def start_vllm(model: Path, workload: Workload, batch: Batch, *, eager: bool) -> tuple[Generate, dict[str, float]]:
    os.environ.update({"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR", "DO_NOT_TRACK": "1"})
    from vllm import LLM, SamplingParams

    llm = LLM(
        str(model),
        dtype="float32",
        max_model_len=_context(workload),
        max_num_seqs=len(batch),
        kv_cache_memory_bytes=int(CACHE_GIB * (1 << 30)),
        enforce_eager=eager,
        skip_tokenizer_init=True,
    )
    prompts = [{"prompt_token_ids": list(prompt)} for prompt, _ in batch]
    parameters = [
        SamplingParams(max_tokens=length, temperature=1.0, logprobs=0, ignore_eos=True, detokenize=False)
        for _, length in batch
    ]

    def generate() -> int:
        outputs = llm.generate(prompts, parameters, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    return generate, {}


def _context(workload: Workload) -> int:
    return workload.prompt_tokens[1] + workload.max_response


def serve(system: str, workload: Workload, model: Path) -> None:
    """Measured process: builds, warms up, then generates one batch per line on standard input."""
    batch = make_batch(workload)
    began = time.perf_counter()
    if system.startswith("rlhpc"):
        generate, facts = start_rlhpc(model, workload, batch, compiled=system.endswith("compiled"))
    else:
        generate, facts = start_vllm(model, workload, batch, eager=system.endswith("eager"))
    generate()
    answer({"start_seconds": time.perf_counter() - began, **facts})
    for _ in sys.stdin:
        began, cpu = time.perf_counter(), time.process_time()
        tokens = generate()
        assert tokens == sum(length for _, length in batch), "responses ended early"
        answer({"tokens": tokens, "seconds": time.perf_counter() - began, "cpu_seconds": time.process_time() - cpu})


def measure(workload: Workload, model: Path, rounds_wanted: int, threads: int, folder: Path) -> dict[str, Any]:
    """Figures of every system: medians over the rounds, and all rounds."""
    with ExitStack() as stack:
        servers = {}
        for system in SYSTEMS:
            arguments = [workload.name, "--serve", system, "--model", str(model)]
            environment = {"OMP_NUM_THREADS": str(threads)}
            if system == "rlhpc":
                environment["TORCHDYNAMO_DISABLE"] = "1"  # as its launcher does
            log = folder / f"{workload.name}-{system}.log"
            servers[system] = Server("bench.rollout", arguments, environment, log)
            stack.callback(servers[system].close)
        rounds: dict[str, list[dict[str, float]]] = {system: [] for system in SYSTEMS}
        for index in range(rounds_wanted):
            for shift in range(len(SYSTEMS)):  # rotates the order
                system = SYSTEMS[(index + shift) % len(SYSTEMS)]
                rounds[system].append(servers[system].run())
    rates = {system: [r["tokens"] / r["seconds"] for r in runs] for system, runs in rounds.items()}
    return {
        "workload": workload.name,
        "tokens_per_second": {system: statistics.median(values) for system, values in rates.items()},
        "spread": {system: (min(values), max(values)) for system, values in rates.items()},
        # With one thread on a busy machine, more reliable than wall time.
        "cpu_microseconds_per_token": {
            system: statistics.median(r["cpu_seconds"] / r["tokens"] * 1e6 for r in runs)
            for system, runs in rounds.items()
        },
        "weight_sync_seconds": servers["rlhpc"].facts["weight_sync_seconds"],
        "start_seconds": {system: server.facts["start_seconds"] for system, server in servers.items()},
        "rounds": rounds,
    }


def show(found: list[dict[str, Any]]) -> None:
    titles = f"{'tokens/s':>9}{'spread':>14}{'CPU µs/token':>14}{'start s':>9}{'rlhpc / it':>12}"
    print(f"{'workload':10}{'system':15}{titles}")
    for entry in found:
        for system, rate in entry["tokens_per_second"].items():
            spread = "{:.0f}-{:.0f}".format(*entry["spread"][system])
            cpu, start = entry["cpu_microseconds_per_token"][system], entry["start_seconds"][system]
            ratio = entry["tokens_per_second"]["rlhpc"] / rate
            print(f"{entry['workload']:10}{system:15}{rate:9.0f}{spread:>14}{cpu:14.1f}{start:9.1f}{ratio:12.2f}")
        print(f"{entry['workload']:10}weight sync of rlhpc's engine: {entry['weight_sync_seconds'] * 1e3:.0f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", choices=[[], *sorted(WORKLOADS)], help="default: all")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1, help="threads per system; default: 1")
    parser.add_argument("--json", type=Path, help="file for all figures")
    parser.add_argument("--serve", choices=SYSTEMS, help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    workloads = [WORKLOADS[name] for name in arguments.workloads or sorted(WORKLOADS, reverse=True)]
    if arguments.serve:
        serve(arguments.serve, workloads[0], arguments.model)
        return
    with tempfile.TemporaryDirectory(prefix="bench-rollout-") as name:
        folder, found = Path(name), []
        for workload in workloads:
            model = folder / workload.name
            subprocess.run([sys.executable, "-m", "bench.models", workload.name, str(model)], cwd=ROOT, check=True)
            found.append(measure(workload, model, arguments.rounds, arguments.threads, folder))
    show(found)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
