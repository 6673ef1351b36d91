"""Peak memory of log-probs and entropy, forward and backward, vs. plain PyTorch.

    python -m bench.log_prob_memory              # vocabulary 150,000, 4,096 tokens, bfloat16 logits

Each way is a separate process. Memory beyond the logits counts: on a CPU by the peak resident size, on a GPU by
PyTorch's allocator. Plain: ``log_softmax`` of the logits in float32.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys

WAYS = ("rlhpc", "plain")


def measure(way: str, tokens: int, vocabulary: int) -> dict[str, float]:
    """MiB beyond the logits, and a checksum of the gradient to compare both ways."""
    import torch
    import torch.distributed as dist

    from rlhpc.parallel.compat import device

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.manual_seed(0)
    where = device()
    logits = torch.randn(tokens, vocabulary, dtype=torch.bfloat16, device=where).requires_grad_()
    targets, rows = torch.randint(0, vocabulary, (tokens,), device=where), torch.arange(tokens, device=where)
    warm = torch.randn(2, vocabulary, dtype=torch.bfloat16, device=where).requires_grad_()
    _both(way, warm, rows[:2], targets[:2])
    before = _peak(where)
    _both(way, logits, rows, targets)
    return {"MiB": (_peak(where) - before) / 2**20, "checksum": float(logits.grad[:16].float().abs().sum())}


def _both(way: str, logits, rows, targets) -> None:  # type: ignore[no-untyped-def]
    import torch.distributed as dist

    from rlhpc.backends.megatron.log_probs import Rows, token_stats

    if way == "rlhpc":
        stats = token_stats(logits, Rows(rows, targets, logits.size(-1)), dist.group.WORLD, 1.0)
        (stats.log_probs.sum() + stats.entropy.sum()).backward()
    else:
        log_probs = logits.float().log_softmax(-1)
        entropy = -(log_probs.exp() * log_probs).sum(-1)
        (log_probs.gather(-1, targets[:, None]).sum() + entropy.sum()).backward()


def _peak(where) -> float:  # type: ignore[no-untyped-def]
    import torch

    if where.type == "cuda":
        return float(torch.cuda.max_memory_allocated())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--vocabulary", type=int, default=150_000)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        print(json.dumps(measure(options.way, options.tokens, options.vocabulary)))
        return
    found = {}
    for way in WAYS:
        command = [sys.executable, "-m", "bench.log_prob_memory", "--way", way]
        command += ["--tokens", str(options.tokens), "--vocabulary", str(options.vocabulary)]
        found[way] = json.loads(
            subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1]
        )
        print(
            f"{way:8} {found[way]['MiB']:8,.0f} MiB beyond the logits, gradient checksum {found[way]['checksum']:.3f}"
        )
    print(f"ratio    {found['rlhpc']['MiB'] / found['plain']['MiB']:.3f}")


if __name__ == "__main__":
    main()
