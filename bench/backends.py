"""A GRPO step on FSDP2 vs. Megatron-core: same machine, cores, model, prompts and response lengths.

    python -m bench.backends             # the 30M model, back ends in turn
    python -m bench.backends tiny --rounds 1

Two processes of one thread. The target is 0.9 of Megatron's tokens per second. With ``--document`` instead: one
document of 32,768 tokens, forward and backward, shared by two ranks (context parallelism), in less than two minutes.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.grpo_step import PARTS, Plan, make_inputs, run_rlhpc
from bench.workload import WORKLOADS

BACKENDS = ("megatron", "fsdp")
TARGET = 0.9
TOKENS, MOST_SECONDS = 32_768, 120.0
_DOCUMENT_MODEL = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": TOKENS,
}


def compare(name: str, plan: Plan, rounds: int) -> int:
    """Prints medians over all timed steps; returns the exit code."""
    workload = WORKLOADS[name]
    model, prompts = make_inputs(workload, plan)
    steps: dict[str, list[dict[str, Any]]] = {backend: [] for backend in BACKENDS}
    for turn in range(rounds):
        for backend in BACKENDS:
            log = plan.folder / f"{name}-{turn}-{backend}.log"
            result = run_rlhpc(workload, plan, model, prompts, log, [f"train.backend={backend}"])
            steps[backend] += result["steps"]
    rates = {}
    print("model  back end  steps  tokens/step  step s  generate s  log-probs s  update s  tokens/s  ratio")
    for backend, found in steps.items():
        keys = ("completion_tokens", "seconds", *PARTS)
        mid = {key: statistics.median(step[key] for step in found) for key in keys}
        rates[backend] = statistics.median(step["completion_tokens"] / step["seconds"] for step in found)
        figures = "  ".join(f"{mid[part]:10.2f}" for part in PARTS)
        print(
            f"{name:5}  {backend:8}  {len(found):5}  {mid['completion_tokens']:11.0f}  {mid['seconds']:6.2f}  {figures}"
            f"  {rates[backend]:8.0f}  {rates[backend] / rates['megatron']:5.2f}"
        )
    return 0 if rates["fsdp"] >= TARGET * rates["megatron"] else 1


def document() -> int:
    """Prints the seconds of a long document on two ranks, by each exchange; returns the exit code."""
    from bench import backends  # by a name that ranks can import
    from tests.helpers.distributed import run_ranks

    with tempfile.TemporaryDirectory() as name:
        folder = run_ranks(backends.make_long_model, 1, Path(name))[0]
        found = {}
        for method in ("ulysses", "all_gather"):
            ranks = run_ranks(backends.document_seconds, 2, folder, method)
            found[method] = max(seconds for seconds, _ in ranks)
            print(f"{TOKENS:,} tokens on 2 ranks, {method}: {found[method]:.1f} s, {max(m for _, m in ranks):.2f} GiB")
    return 0 if max(found.values()) < MOST_SECONDS else 1


def make_long_model(folder: Path) -> Path:
    """A small Llama for long documents."""
    import transformers

    config = transformers.LlamaConfig(**_DOCUMENT_MODEL)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def document_seconds(folder: Path, method: str) -> tuple[float, float]:
    """Seconds of a forward and backward pass over one document, and the rank's peak memory in GiB."""
    import resource

    import numpy as np

    from rlhpc.data.collate import pack_batch
    from tests.backends.fsdp.backend_cases import Case, make_backend
    from tests.helpers.training import negative_log_likelihood, optimizer_section

    backend = make_backend(folder, Case("", cp=2, cp_method=method), optimizer_section())
    tokens = np.random.default_rng(0).integers(2, 256, TOKENS)
    batch = pack_batch([(tokens, 1)], sample_ids=[0])
    began = time.perf_counter()
    backend.differentiate([batch], negative_log_likelihood, float(TOKENS), 1.0)
    return time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="30m", choices=list(WORKLOADS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--document", action="store_true", help="time one long document instead")
    options = parser.parse_args()
    if options.document:
        sys.exit(document())
    folder = Path(tempfile.mkdtemp(prefix="bench-backends-"))
    plan = Plan(folder, {"rlhpc": sys.executable}, processes=2, threads=1, steps=options.steps, warmup=1)
    sys.exit(compare(options.model, plan, options.rounds))


if __name__ == "__main__":
    main()
