"""Compares log-probs of both sides of a conversion: transformers on HuggingFace's files, each back end on its own.

Both compute in float32 for any type in the files, and load the whole model: for models that fit on one machine.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rlhpc.convert.sides import HuggingFaceSide, ShardedSide, Side
from rlhpc.convert.verify import Report
from rlhpc.core import env
from rlhpc.core.errors import UserError
from rlhpc.core.rank import RankInfo
from rlhpc.models import ModelDescription, ModelShape

_SEQUENCES, _LENGTH = 2, 64
_MAX_DIFFERENCE = 1e-3  # nats; float32 rounding in another order causes a hundredth of it


def compare_logprobs(report: Report) -> list[str]:
    """Line with the largest difference of log-probs; adds a fault to ``report`` if it is too large."""
    assert report.source is not None
    assert report.target is not None
    os.environ.setdefault(env.TORCHDYNAMO_DISABLE, "1")  # one forward pass: compiling would take longer
    shape = _shape(report.source, report.target)
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
    """Log-probs of each token after the first, given those before it. Raises UserError."""
    try:
        if isinstance(side, HuggingFaceSide):
            return _by_transformers(side.folder, sequences)
        if isinstance(side, ShardedSide):
            return _by_fsdp(side, sequences)
        return _by_megatron(side.folder, side.shape, sequences)
    except (UserError, ModuleNotFoundError):
        raise
    except Exception as error:  # transformers and torch raise many types for a model that they cannot build
        reason = next(iter(str(error).strip().splitlines()), "")[:300]
        raise UserError(
            f"the model cannot be computed ({type(error).__name__}: {reason})",
            where=str(side.folder),
            remedy="complete its config.json, or leave out --logprobs",
        ) from error


def _shape(*sides: Side) -> ModelDescription:
    """The model by a side that describes it: a checkpoint of the FSDP2 back end does not."""
    found = next((side.shape for side in sides if not isinstance(side, ShardedSide)), None)
    if found is None:
        raise UserError("compares with a HuggingFace folder", where="--logprobs", remedy="convert one of both first")
    return found


def _by_transformers(folder: Path, sequences: list[list[int]]) -> list[list[float]]:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return [_of_logits(lambda ids: model(ids).logits, tokens) for tokens in sequences]


def _of_logits(logits_of: Callable[[Any], Any], tokens: list[int]) -> list[float]:
    import torch

    ids = torch.tensor([tokens])
    with torch.no_grad():
        log_probs = logits_of(ids)[0, :-1].float().log_softmax(-1)
    found: list[float] = log_probs.gather(-1, ids[0, 1:, None])[:, 0].tolist()
    return found


def _by_fsdp(side: ShardedSide, sequences: list[list[int]]) -> list[list[float]]:
    import torch
    from transformers import AutoConfig

    from rlhpc.backends.fsdp.checkpoint import ShardedCheckpoint
    from rlhpc.backends.fsdp.sharded_model import BuildOptions, ShardedModel, make_meshes
    from rlhpc.backends.fsdp.weight_shards import WeightShards
    from rlhpc.sharding.mesh_sizes import MeshSizes

    with _one_rank():
        config = type(AutoConfig.from_pretrained(side.model_folder)).from_dict(dict(side.fields))
        options = BuildOptions(attention="eager", compute_dtype=torch.float32)
        model = ShardedModel(config, make_meshes(MeshSizes(), "cpu"), options, torch.device("cpu"))
        ShardedCheckpoint(model, WeightShards(model)).load(side.folder)
        return [_of_logits(model, tokens) for tokens in sequences]


def _by_megatron(folder: Path, shape: ModelDescription, sequences: list[list[int]]) -> list[list[float]]:
    import numpy as np

    from rlhpc.backends.megatron import MegatronBackend
    from rlhpc.config.model_settings import ModelSettings
    from rlhpc.config.training import ParallelSection
    from rlhpc.data.collate import pack_batch
    from rlhpc.parallel.groups import build_groups
    from rlhpc.sharding.layout import ParallelLayout

    assert isinstance(shape, ModelShape)
    layout = ParallelLayout(1)
    with _one_rank() as (info, joined):
        if joined:
            build_groups(layout, seed=0)
        backend = MegatronBackend(shape, layout, info, "float32", ModelSettings(ParallelSection()))
        backend.load_pretrained(folder)
        batches = [pack_batch([(np.array(tokens), 1)], sample_ids=[i]) for i, tokens in enumerate(sequences)]
        stats = backend.log_probs(batches, temperature=1.0)
    # The value at a position belongs to the next token.
    return [found.log_probs[: len(tokens) - 1].tolist() for found, tokens in zip(stats, sequences, strict=True)]


@contextlib.contextmanager
def _one_rank() -> Iterator[tuple[RankInfo, bool]]:
    """A job of this process alone, unless it is in one; and whether it was made here."""
    import torch.distributed as dist

    from rlhpc.parallel.groups import join, leave

    info, joined = RankInfo(0, 1, 0, socket.gethostname(), "127.0.0.1", 0), not dist.is_initialized()
    if joined:
        join(info)
    try:
        yield info, joined
    finally:
        if joined:
            leave()
