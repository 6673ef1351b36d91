"""Builds trainers and engines for the parts, with random weights from fixed seeds and no files but config.json."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.shapes import model_fields
from rlhpc.config.model_settings import ModelSettings
from rlhpc.config.rollout import RolloutSection
from rlhpc.config.schema import ReshardSection
from rlhpc.core.errors import ReshardError
from rlhpc.core.files import write_atomic
from rlhpc.core.rank import RankInfo
from rlhpc.models import ModelShape, shape_of
from rlhpc.sharding.engine_shards import EngineLayout
from rlhpc.sharding.layout import ParallelLayout, make_layout
from rlhpc.sharding.mesh_sizes import make_mesh_sizes
from rlhpc.sharding.shards import model_tensors

LEARNING_RATE = 1e-3  # changes weights by about 5%, so that stale weights show in log-probs
ENGINE_FRACTION = 0.1  # share of the GPU that vLLM requires to be free at startup; the cache has a given size
FIRST_TOKEN = 16  # prompts avoid the ids of special tokens


def model_folder(folder: Path, name: str, layers: int | None, dtype: str, **changes: Any) -> tuple[Path, ModelShape]:
    """Write ``config.json``, the only file that these engines read; return folder and shape."""
    fields = {**model_fields(name, layers, dtype), **changes}
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / "config.json", json.dumps(fields))  # every rank writes it
    return folder, shape_of(fields, where=name)


def join_ranks(*, share_gpu: bool = False) -> None:
    """Join the default process group and build Megatron's groups, as a run does. Collective.

    ``share_gpu``: all ranks use one GPU through gloo, since NCCL refuses that.
    """
    import torch
    import torch.distributed as dist

    from rlhpc.parallel.groups import build_groups

    info = RankInfo.from_environ()
    if share_gpu:
        torch.cuda.set_device(0)
        dist.init_process_group("gloo", rank=info.rank, world_size=info.world_size)
    else:
        join_world()
    build_groups(ParallelLayout(info.world_size), seed=0)


def join_world() -> None:
    """Join the default process group alone, which is what FSDP2 needs. Collective."""
    from rlhpc.parallel.groups import join

    join(RankInfo.from_environ())


def make_actor(shape: ModelShape, dtype: str, settings: ModelSettings, groups: Any = None) -> Any:
    """A back end with random weights, the same in every layout. Collective.

    ``groups``: Megatron's groups for this layout; default: those in force.
    """
    from rlhpc.backends.kernels.compiled import choose_compilation
    from rlhpc.backends.megatron import MegatronBackend

    info = RankInfo.from_environ()
    choose_compilation("auto")
    actor = MegatronBackend(shape, make_layout(settings.parallel, info.world_size), info, dtype, settings, groups)
    actor.take_tensors(random_tensors(shape, dtype))
    return actor


def make_fsdp_actor(folder: Path, shape: ModelShape, dtype: str, settings: ModelSettings, *, compiled: bool) -> Any:
    """A back end on FSDP2, of the model whose ``config.json`` is in a folder. ``compiled``: its layers. Collective."""
    import torch

    from rlhpc.backends.fsdp.fsdp_backend import FsdpBackend
    from rlhpc.backends.fsdp.sharded_model import make_meshes
    from rlhpc.backends.fsdp.source import ModelSource, read_config
    from rlhpc.backends.kernels.compiled import choose_compilation
    from rlhpc.parallel.compat import device

    choose_compilation("blocks" if compiled else "auto")
    meshes = make_meshes(make_mesh_sizes(settings.parallel, RankInfo.from_environ().world_size), device().type)
    accumulation = "keep" if settings.memory.accumulation == "keep" else "reduce"
    source = ModelSource(shape, read_config(folder), meshes, getattr(torch, dtype), accumulation, compiled)
    actor = FsdpBackend(source, settings)
    actor.take_tensors(random_tensors(shape, dtype))
    return actor


def random_tensors(shape: ModelShape, dtype: str) -> Iterator[tuple[str, Any]]:
    """(name, full tensor) of every weight. Matrices are scaled so that logits vary by about 1 at any width."""
    import torch

    from rlhpc.parallel.compat import device

    generator = torch.Generator(device())
    std = 0.8 / shape.hidden_size**0.5
    for spec in model_tensors(shape):
        generator.manual_seed(zlib.crc32(spec.name.encode()))
        kind = torch.float32 if spec.float32 else getattr(torch, dtype)
        mean = 1.0 if "norm" in spec.name else 0.0
        tensor = torch.empty(spec.shape, dtype=kind, device=device())
        yield spec.name, tensor.normal_(mean, std, generator=generator)


def make_engine(
    folder: Path, shape: ModelShape, dtype: str, tokens: int, *, routed_experts: bool = False, **section: Any
) -> Any:
    """A sleeping engine without weights. ``tokens``: of the longest sequence; ``section``: keys of the section rollout.
    Collective."""
    from rlhpc.rollout.vllm_arguments import ServedModel
    from rlhpc.rollout.vllm_engine import VllmEngine

    keys = {"cuda_graphs": False, "gpu_memory_utilization": ENGINE_FRACTION, **section}
    served = ServedModel(folder, shape, dtype, tokens)
    return VllmEngine(served, RolloutSection(**keys), routed_experts=routed_experts)


def make_manager(actor: Any, engine: Any, *, share_weights: bool = False, tp: int = 1, ranks_per_node: int = 1) -> Any:
    """Weight sync from the actor to the engine. Cases verify explicitly and report. Collective."""
    from rlhpc.parallel.compat import device
    from rlhpc.reshard.manager import Job, ReshardManager
    from rlhpc.reshard.sides import sync_sides

    job = Job(ranks_per_node, actor.weights.dtype, device())
    section = ReshardSection(verify="never", share_weights=share_weights)
    sides = sync_sides(actor.weights.shape, actor.layout, EngineLayout(tp))
    return ReshardManager(actor, engine, sides, section, job)


def verification_error(manager: Any) -> str:
    """Error of writing the weights again and comparing the checksums of both sides, which detect a single wrong bit;
    empty if there is none."""
    manager.write()
    try:
        manager.verify()
    except ReshardError as error:
        return str(error)
    return ""


def requests(shape: ModelShape, count: int, prompt: int, response: int) -> list[Any]:
    """Requests at temperature 1 with random prompts of one length and responses of one length."""
    import numpy as np

    from rlhpc.api import Request

    prompts = np.random.default_rng(0).integers(FIRST_TOKEN, shape.vocab_size, (count, prompt))
    return [
        Request(tuple(tokens.tolist()), seed=seed, max_tokens=response, temperature=1.0)
        for seed, tokens in enumerate(prompts)
    ]


def packed_responses(asked: Sequence[Any], answered: Sequence[Any], tokens: int) -> list[Any]:
    """Prompts with their responses in batches of at most ``tokens``, for training and scoring."""
    import numpy as np

    from rlhpc.data.collate import pack_batch

    pairs = zip(asked, answered, strict=True)
    prompts = [(np.asarray(request.prompt, np.int32), completion) for request, completion in pairs]
    sequences = [(np.concatenate([prompt, completion.tokens]), len(prompt)) for prompt, completion in prompts]
    each = max(1, tokens // max(len(one) for one, _ in sequences))
    batches = []
    for start in range(0, len(sequences), each):
        own = range(start, min(start + each, len(sequences)))
        routed_experts = [answered[i].routed_experts for i in own]
        batches.append(pack_batch([sequences[i] for i in own], sample_ids=own, routed_experts=routed_experts))
    return batches


def random_sequences(shape: ModelShape, lengths: Sequence[int]) -> list[tuple[Any, int]]:
    """Random sequences, each trained on all tokens but the first."""
    import numpy as np

    random = np.random.default_rng(0)
    return [(random.integers(0, shape.vocab_size, length), 1) for length in lengths]


def packed_random(shape: ModelShape, lengths: Sequence[int]) -> Any:
    """One batch of random sequences."""
    from rlhpc.data.collate import pack_batch

    return pack_batch(random_sequences(shape, lengths), sample_ids=range(len(lengths)))


def log_probs(actor: Any, batches: Sequence[Any], prompt: int) -> list[Any]:
    """The trainer's log-probs of the tokens of each response, in order."""
    from rlhpc.data.collate import unpack

    found = []
    for batch, stats in zip(batches, actor.log_probs(batches, temperature=1.0), strict=True):
        found += unpack(batch, stats.log_probs, [prompt] * len(batch.sample_ids))
    return found


def train(actor: Any, batches: Sequence[Any], rate: float = LEARNING_RATE) -> Any:
    """TrainStats of one update on the batches' tokens. Every rank passes the batches of its dp index."""
    return actor.train(batches, likelihood_loss, denominator_of(batches), temperature=1.0, rate=rate)


def differentiate(actor: Any, batches: Sequence[Any]) -> None:
    """Forward and backward pass of the batches."""
    actor.differentiate(batches, likelihood_loss, denominator_of(batches), temperature=1.0)


def likelihood_loss(stats: Any, batch: Any) -> Any:
    """Negative log-likelihood of the tokens trained on."""
    from rlhpc.algo.losses import negative_log_likelihood
    from rlhpc.api import LossSums

    total = negative_log_likelihood(stats.log_probs, batch.loss_weight)
    return LossSums(total, {"loss": total.detach()})


def denominator_of(batches: Sequence[Any]) -> float:
    """Number of tokens trained on."""
    return float(sum(batch.loss_weight.sum() for batch in batches))


def differences(ours: Sequence[Any], theirs: Sequence[Any]) -> tuple[float, float]:
    """Mean and maximum absolute difference of per-token values; NaN if any value is."""
    import numpy as np

    gap = np.abs(np.concatenate(list(ours)) - np.concatenate(list(theirs)))
    return float(gap.mean()), float(gap.max())
