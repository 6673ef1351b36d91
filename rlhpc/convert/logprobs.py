"""Compares log-probs of both sides of a conversion: transformers on HuggingFace's files, Megatron on its own.

Both compute in float32 for any type in the files, and load the whole model: for models that fit on one machine.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

from rlhpc.convert.sides import HuggingFaceSide, Side
from rlhpc.convert.verify import Report
from rlhpc.core import env
from rlhpc.core.rank import RankInfo
from rlhpc.models import ModelShape

_SEQUENCES, _LENGTH = 2, 64
_MAX_DIFFERENCE = 1e-3  # nats; float32 rounding in another order causes a hundredth of it


def compare_logprobs(report: Report) -> list[str]:
    """Line with the largest difference of log-probs; adds a fault to ``report`` if it is too large."""
    assert report.source is not None
    assert report.target is not None
    os.environ.setdefault(env.TORCHDYNAMO_DISABLE, "1")  # one forward pass: compiling would take longer
    shape = report.source.shape
    sequences = [
        [(7919 * (number * _LENGTH + i) + 13) % shape.vocab_size for i in range(min(_LENGTH, shape.max_positions))]
        for number in range(_SEQUENCES)
    ]
    one, two = (_log_probs(side, sequences) for side in (report.source, report.target))
    apart = max(abs(a - b) for first, second in zip(one, two, strict=True) for a, b in zip(first, second, strict=True))
    text = f"log-probs of {sum(map(len, one))} tokens differ by at most {apart:.1e}"
    if not apart < _MAX_DIFFERENCE:
        report.faults.append(text)
    return [text]


def _log_probs(side: Side, sequences: list[list[int]]) -> list[list[float]]:
    """Log-probs of each token after the first, given those before it."""
    if isinstance(side, HuggingFaceSide):
        return _by_transformers(side.folder, sequences)
    return _by_megatron(side.folder, side.shape, sequences)


def _by_transformers(folder: Path, sequences: list[list[int]]) -> list[list[float]]:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    found = []
    with torch.no_grad():
        for tokens in sequences:
            ids = torch.tensor([tokens])
            log_probs = model(ids).logits[0, :-1].float().log_softmax(-1)
            found.append(log_probs.gather(-1, ids[0, 1:, None])[:, 0].tolist())
    return found


def _by_megatron(folder: Path, shape: ModelShape, sequences: list[list[int]]) -> list[list[float]]:
    import numpy as np
    import torch.distributed as dist

    from rlhpc.backends.megatron import MegatronBackend
    from rlhpc.config.model_settings import ModelSettings
    from rlhpc.config.training import ParallelSection
    from rlhpc.data.collate import pack_batch
    from rlhpc.parallel.groups import build_groups, join, leave
    from rlhpc.sharding.layout import ParallelLayout

    info, layout = RankInfo(0, 1, 0, socket.gethostname(), "127.0.0.1", 0), ParallelLayout(1)
    joined = not dist.is_initialized()
    if joined:
        join(info)
        build_groups(layout, seed=0)
    try:
        backend = MegatronBackend(shape, layout, info, "float32", ModelSettings(ParallelSection()))
        backend.load_pretrained(folder)
        batches = [pack_batch([(np.array(tokens), 1)], sample_ids=[i]) for i, tokens in enumerate(sequences)]
        stats = backend.log_probs(batches, temperature=1.0)
    finally:
        if joined:
            leave()
    # The value at a position belongs to the next token.
    return [found.log_probs[: len(tokens) - 1].tolist() for found, tokens in zip(stats, sequences, strict=True)]
