"""Model FLOP/s utilisation of a training step on this machine's one device.

    python -m tools.mfu 1.5b                    # Qwen2.5-1.5B's shape, 8 micro batches of 8,192 packed tokens, bfloat16
    python -m tools.mfu 8b --host-fraction 0.5  # Llama-3.1-8B's shape, half of the optimizer on the host

Weights are random, nothing is read. A step is a whole one: forward and backward of every micro batch, reduction,
clipping, AdamW. Operations are those of the arithmetic (rlhpc/plan/flops.py), over the device's dense bfloat16 peak.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from typing import Any

from rlhpc.models import ModelShape, shape_of
from rlhpc.plan.flops import training_flops
from rlhpc.plan.hardware import peak_tflops

_LLAMA = {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 131072, "rope_theta": 500000.0}
_QWEN = {"architectures": ["Qwen2ForCausalLM"], "max_position_embeddings": 32768, "rope_theta": 1e6}
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        **_QWEN,
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
    },
    "1.5b": {
        **_QWEN,
        "num_hidden_layers": 28,
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "8b": {
        **_LLAMA,
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
}


def measure(shape: ModelShape, lengths: Sequence[int], micro_batches: int, steps: int, **levers: Any) -> dict[str, Any]:
    """Seconds of each of ``steps`` updates on ``micro_batches`` copies of one packed batch, and what follows."""
    import torch

    from rlhpc.algo.losses import negative_log_likelihood
    from rlhpc.api import LossSums, PackedBatch, TokenStats
    from rlhpc.parallel.groups import leave

    def loss(stats: TokenStats, batch: PackedBatch) -> LossSums:
        total = negative_log_likelihood(stats.log_probs, batch.loss_weight)
        return LossSums(total, {"loss": total.detach()})

    actor = _actor(shape, **levers)
    batch = _batch(shape, lengths)
    tokens = sum(lengths) * micro_batches
    seconds = []
    for step in range(steps + 2):  # the first two warm up
        start = time.perf_counter()
        actor.train([batch] * micro_batches, loss, tokens, temperature=1.0, rate=1e-6)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        if step >= 2:
            seconds.append(time.perf_counter() - start)
    leave()
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    peak, median = peak_tflops(name), statistics.median(seconds)
    achieved = training_flops(shape, lengths) * micro_batches / median / 1e12
    return {
        "device": name,
        "torch": torch.__version__,
        "tokens_per_step": tokens,
        "seconds": [round(s, 4) for s in seconds],
        "tokens_per_second": round(tokens / median, 1),
        "tflops": round(achieved, 4),
        "mfu": round(achieved / peak, 4) if peak else None,
        "peak_memory_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1) if torch.cuda.is_available() else None,
    }


def _actor(shape: ModelShape, host_fraction: float = 0.0, recompute: str = "none") -> Any:
    import torch

    from rlhpc.backends.megatron import MegatronBackend
    from rlhpc.config.schema import MemorySection, OptimizerSection, ParallelSection
    from rlhpc.core.rank import RankInfo
    from rlhpc.parallel.groups import build_groups, join
    from rlhpc.plan.layout import ParallelLayout

    info, layout = RankInfo.from_environ(), ParallelLayout(1)
    join(info)
    build_groups(layout, seed=0)
    section, memory = OptimizerSection(host_fraction=host_fraction), MemorySection(recompute=recompute)
    actor = MegatronBackend(shape, layout, info, "bfloat16", ParallelSection(), section, memory=memory)
    with torch.no_grad():
        for weights in actor.weights.parameters():
            weights.fill_(1.0) if weights.dim() == 1 else weights.normal_(std=0.02)
    actor.reset_optimizer()
    return actor


def _batch(shape: ModelShape, lengths: Sequence[int]) -> Any:
    import numpy as np

    from rlhpc.data.collate import pack_batch

    draw = np.random.default_rng(0)
    sequences = [(draw.integers(0, shape.vocab_size, length), 1) for length in lengths]
    return pack_batch(sequences, sample_ids=range(len(lengths)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 1024, 3072, 512, 1536])
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--host-fraction", type=float, default=0.0)
    parser.add_argument("--recompute", choices=("none", "selective", "full"), default="none")
    options = parser.parse_args()
    levers = {"host_fraction": options.host_fraction, "recompute": options.recompute}
    result = measure(shape_of(SHAPES[options.shape]), options.lengths, options.micro_batches, options.steps, **levers)
    print(json.dumps({"shape": options.shape, "lengths": options.lengths, **levers, **result}))


if __name__ == "__main__":
    main()
