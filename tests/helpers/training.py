"""A small actor on real ranks with a few fixed updates, to compare ways of training."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from rlhpc.api import LossSums
from rlhpc.backends.megatron import MegatronBackend
from rlhpc.backends.megatron.head import head_weight, trained_rows
from rlhpc.config.model_settings import ModelSettings
from rlhpc.config.training import MemorySection, MoeSection, OptimizerSection, ParallelSection
from rlhpc.core.rank import RankInfo
from rlhpc.data.collate import pack_batch
from rlhpc.models import read_model
from rlhpc.parallel.groups import Groups, build_groups
from rlhpc.sharding.layout import make_layout

LENGTHS = (11, 3, 40, 7, 9, 22, 64, 5)
TOKENS = sum(LENGTHS) - len(LENGTHS)  # predicted tokens


def build_actor(
    folder: Path,
    optimizer: Any = None,
    memory: Any = None,
    dtype: str = "float32",
    experts: Any = None,
    family: str | None = None,
    head: str = "vocabulary",
    own_groups: bool = False,
    **parallel: Any,
) -> Any:
    """Back end for the model of ``folder``, without its weights.

    All live actors of a process share one layout, except those with groups of their own.
    """
    section, info, shape = ParallelSection(**parallel), RankInfo.from_environ(), read_model(folder, family)
    layout = make_layout(section, info.world_size)
    if not own_groups and not parallel_state.model_parallel_is_initialized():
        build_groups(layout, seed=1)
    shape = shape.with_value_head if head == "value" else shape
    settings = ModelSettings(section, memory or MemorySection(), experts or MoeSection(), optimizer)
    return MegatronBackend(shape, layout, info, dtype, settings, Groups(layout) if own_groups else None)


def make_actor(folder: Path, *args: Any, **options: Any) -> Any:
    """The same with its weights and, if it is trained, an optimizer."""
    backend = build_actor(folder, *args, **options)
    backend.load_pretrained(folder)
    return backend


def logits_of(backend: Any, batches: Sequence[Any]) -> list[Any]:
    """Logits over the whole vocabulary for each batch, on the last pipeline stage."""

    def gather(batch: Any, local: Any, hidden: Any, **_: Any) -> Any:
        group, model = parallel_state.get_tensor_model_parallel_group(), backend.models[-1]
        every = torch.arange(len(local.tokens), device=hidden.device)
        rows = trained_rows(hidden[0], every, len(every), sequence_parallel=backend._config.sequence_parallel)
        logits = rows @ head_weight(model).t()
        parts = [torch.empty_like(logits) for _ in range(group.size())]
        dist.all_gather(parts, logits, group=group)
        return local.gather(torch.cat(parts, dim=-1), parallel_state.get_context_parallel_group())

    with torch.no_grad():
        return list(backend._run(batches, gather, forward_only=True, collect_non_loss_data=True))


def optimizer_section(**changes: Any) -> Any:
    return OptimizerSection(
        **{"learning_rate": 1e-3, "weight_decay": 0.1, "max_grad_norm": 0.5, "epsilon": 1e-5, **changes}
    )


def sequences() -> list[Any]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(2, 64, (length,), generator=generator) for length in LENGTHS]


def batches_of(backend: Any) -> list[Any]:
    """This rank's share of the sequences, in as many microbatches as on every rank."""
    layout = backend.layout
    mine = list(enumerate(sequences()))[layout.coord(dist.get_rank())["dp"] :: layout.dp]
    count = min(3, len(LENGTHS) // layout.dp)  # odd, so that interleaved stages need a blank one
    parts = [mine[i::count] for i in range(count)]
    return [pack_batch([(s.numpy(), 1) for _, s in part], sample_ids=[i for i, _ in part]) for part in parts]


def packed_batch(lengths: Sequence[int]) -> Any:
    """A batch of random sequences of these lengths."""
    generator = torch.Generator().manual_seed(3)
    made = [torch.randint(2, 64, (length,), generator=generator).numpy() for length in lengths]
    return pack_batch([(tokens, 1) for tokens in made], sample_ids=list(range(len(made))))


def negative_log_likelihood(stats: Any, batch: Any) -> Any:
    loss = -(stats.log_probs * batch.loss_weight).sum()
    return LossSums(loss, {"loss": loss.detach()})


def update(backend: Any) -> Any:
    """TrainStats of one update."""
    return backend.train(batches_of(backend), negative_log_likelihood, TOKENS, 1.0, 1e-3)


def train(backend: Any, steps: int = 1) -> list[tuple[float, float]]:
    """(loss, gradient norm) of each update."""
    stats = [update(backend) for _ in range(steps)]
    return [(s.sums["loss"] / TOKENS, s.grad_norm) for s in stats]


def save(backend: Any, folder: Path, **options: Any) -> Any:
    """Save to a folder that may not exist yet. Collective."""
    folder.mkdir(exist_ok=True)
    dist.barrier()
    return backend.save(folder, **options)


def separate_gradients(backend: Any) -> None:
    """Lets linear layers return gradients of weights instead of adding them to buffers.

    For hooks on saved tensors, which return a copy of a weight, without buffer.
    """
    for module in (module for model in backend.models for module in model.modules()):
        if hasattr(module, "gradient_accumulation_fusion"):
            module.gradient_accumulation_fusion = False


def digest(backend: Any) -> str:
    """SHA-256 of all weights."""
    found = hashlib.sha256()
    for name, tensor in backend.full_tensors():
        found.update(name.encode())
        found.update(tensor.detach().float().cpu().clone().numpy().tobytes())  # numpy() would pin the storage
    return found.hexdigest()
