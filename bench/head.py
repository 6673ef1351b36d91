"""Memory and time of a policy's head, forward and backward, vs. whole logits.

    python -m bench.head                         # 4,096 tokens, vocabulary 151,936, hidden 1,536; one rank and two

From hidden states to log-probs and entropy, and back to the gradients of hidden states and of the weight, which is
added to a float32 buffer as in training. "whole" is the former way: all logits of a rank, sums of them in pieces, and
the gradient of all logits. Memory is the peak beyond hidden states, weight and buffer: resident memory on a CPU,
PyTorch's allocator on a GPU. Each way and rank is a process; seconds are the least of several runs, CPU seconds those
of all threads.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

WAYS = ("blocks", "whole")


def measure(options: argparse.Namespace) -> dict[str, float]:
    """MiB, seconds, and a checksum of the gradients to compare both ways."""
    import torch
    import torch.distributed as dist

    from rlhpc.parallel.compat import device

    store = dist.FileStore(options.store, options.ranks)
    dist.init_process_group("gloo", store=store, rank=options.rank, world_size=options.ranks)
    where, dtype = device(), getattr(torch, options.dtype)
    if where.type == "cpu":
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // options.ranks))
    torch.manual_seed(0)
    hidden = torch.randn(options.tokens, options.hidden, dtype=dtype, device=where).requires_grad_()
    targets = torch.randint(0, options.vocabulary, (options.tokens,), device=where)
    torch.manual_seed(1 + options.rank)
    rows = options.vocabulary // options.ranks
    weight = (torch.randn(rows, options.hidden, dtype=dtype, device=where) * 0.05).requires_grad_()
    weight.main_grad = torch.zeros(rows, options.hidden, device=where)
    run = {"blocks": _blocks, "whole": _whole}[options.way]
    run(hidden[:2].detach().requires_grad_(), weight, targets[:2], options.vocabulary)
    found = []
    for _ in range(options.repeats):
        weight.main_grad.zero_()
        hidden.grad = torch.zeros_like(hidden)
        found.append(_measured(lambda: run(hidden, weight, targets, options.vocabulary), where))
        weight.grad = None
    checksum = float(hidden.grad.float().abs().sum() + weight.main_grad.abs().sum())
    return {**{name: min(each[name] for each in found) for name in found[0]}, "checksum": checksum}


def _measured(run: Callable[[], None], where: Any) -> dict[str, float]:
    import torch

    on_gpu = where.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
    else:
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins at what is resident now
    before = torch.cuda.memory_allocated() if on_gpu else _resident("VmRSS")
    began, busy = time.perf_counter(), time.process_time()
    run()
    if on_gpu:
        torch.cuda.synchronize()
    seconds, busy = time.perf_counter() - began, time.process_time() - busy
    peak = torch.cuda.max_memory_allocated() if on_gpu else _resident("VmHWM")
    return {"MiB": (peak - before) / 2**20, "seconds": seconds, "cpu_seconds": busy}


def _resident(name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def _blocks(hidden: Any, weight: Any, targets: Any, vocabulary: int) -> None:
    import torch.distributed as dist

    from rlhpc.backends.kernels.loss_head import Head, head_stats

    stats = head_stats(hidden, weight, targets, Head(vocabulary, dist.group.WORLD))
    (stats.log_probs.sum() + stats.entropy.sum()).backward()
    if dist.get_world_size() > 1:
        dist.all_reduce(hidden.grad)


def _whole(hidden: Any, weight: Any, targets: Any, vocabulary: int) -> None:
    import torch.distributed as dist

    from bench.whole_logits import whole_logits_stats

    log_probs, entropy = whole_logits_stats(hidden @ weight.t(), targets, vocabulary)
    (log_probs.sum() + entropy.sum()).backward()
    weight.main_grad.add_(weight.grad)
    weight.grad = None
    if dist.get_world_size() > 1:
        dist.all_reduce(hidden.grad)


def compare(options: argparse.Namespace, ranks: int) -> None:
    """Runs both ways and prints a line for each, of the rank that needs most."""
    found = {}
    for way in WAYS:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "bench.head", "--way", way, "--store", f"{folder}/store"]
            for name in ("tokens", "vocabulary", "hidden", "dtype", "repeats"):
                command += [f"--{name}", str(getattr(options, name))]
            started = [
                subprocess.Popen(
                    [*command, "--ranks", str(ranks), "--rank", str(rank)], stdout=subprocess.PIPE, text=True
                )
                for rank in range(ranks)
            ]
            outputs = [json.loads(process.communicate()[0].splitlines()[-1]) for process in started]
        found[way] = {name: max(output[name] for output in outputs) for name in outputs[0]}
        line = "{MiB:7,.0f} MiB {seconds:7.2f} s {cpu_seconds:7.2f} CPU s  gradients {checksum:.4g}"
        print(f"tp={ranks} {options.dtype} {way:7}", line.format(**found[way]), flush=True)
    of_float32 = 4 * options.tokens * options.vocabulary / 2**20
    ratios = [found["blocks"][name] / found["whole"][name] for name in ("MiB", "seconds", "cpu_seconds")]
    print("ratio: MiB {:.3f}, seconds {:.2f}, CPU seconds {:.2f};".format(*ratios), end=" ")
    print(f"{found['blocks']['MiB'] / of_float32:.3f} of {of_float32:,.0f} MiB of float32 logits")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--hidden", type=int, default=1536)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--ranks", type=int, help="1 or 2; both if left out")
    for name, kind in (("--way", str), ("--rank", int), ("--store", str)):
        parser.add_argument(name, type=kind, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        print(json.dumps(measure(options)))
        return
    for ranks in (options.ranks,) if options.ranks else (1, 2):
        compare(options, ranks)


if __name__ == "__main__":
    main()
