"""Programs of ranks that train with the FSDP2 back end beside plain transformers (tests.helpers.equality)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._dynamo import utils

from rlhpc.backends.fsdp import attention_interface
from rlhpc.backends.kernels.compiled import choose_compilation
from rlhpc.checkpoint.formats.described import describe_model
from rlhpc.config.model_settings import ModelSettings
from rlhpc.config.training import MemorySection, ParallelSection
from rlhpc.parallel.compat import device
from rlhpc.sharding.mesh_sizes import make_mesh_sizes
from tests.helpers.equality import STEPS, beside, make_reference
from tests.helpers.parts import sharded_model_of
from tests.helpers.training import TOKENS, batches_of, negative_log_likelihood, optimizer_section, train


@dataclass(frozen=True)
class Case:
    """A model, the sizes of its mesh (dp_shard takes the remaining ranks), and memory settings."""

    kind: str
    dp_replicate: int = 1
    cp: int = 1
    cp_method: str = "auto"
    memory: dict[str, Any] = field(default_factory=dict)
    compiled: bool = False

    def __str__(self) -> str:
        return f"{self.kind} copies {self.dp_replicate} cp {self.cp} {self.cp_method} {self.memory}"


@dataclass(frozen=True)
class Distance:
    """Distance of a case from the reference, maximum over ranks, tensors and steps."""

    log_probs: float  # absolute
    entropy: float  # absolute
    loss: float  # relative
    grad_norm: float  # relative
    weight: float  # absolute, after the last step

    @property
    def is_small(self) -> bool:
        return max(self.log_probs, self.entropy, self.loss, self.grad_norm, self.weight) < 1e-5


def make_references(folder: Path, kinds: Sequence[str]) -> dict[str, Path]:
    """What plain transformers computes with a model of each kind."""
    return {kind: make_reference(folder / kind, kind) for kind in kinds}


def make_backend(folder: Path, case: Case | None = None, optimizer: Any = None, **options: Any) -> Any:
    """A back end for the model of ``folder``, with its weights and, if it is trained, an optimizer."""
    case = case or Case("")
    parallel = ParallelSection(dp_replicate=case.dp_replicate, cp=case.cp, cp_method=case.cp_method)
    settings = ModelSettings(parallel, MemorySection(**case.memory), optimizer=optimizer)
    backend = bare_backend(folder, settings, compiled=case.compiled, **options)
    backend.load_pretrained(folder)
    return backend


def bare_backend(
    folder: Path,
    settings: Any,
    *,
    head: str = "vocabulary",
    dtype: str = "float32",
    compiled: bool = False,
    run: tuple[int, int | None] | None = None,
) -> Any:
    """The same without weights. ``run``: tokens of its longest sequence, and at which dynamic RoPE is fixed."""
    from rlhpc.backends.fsdp.fsdp_backend import FsdpBackend
    from rlhpc.backends.fsdp.sharded_model import make_meshes
    from rlhpc.backends.fsdp.source import ModelSource, read_config

    choose_compilation("blocks" if compiled else "none")
    meshes = make_meshes(make_mesh_sizes(settings.parallel, dist.get_world_size()), device().type)
    accumulation = "keep" if settings.memory.accumulation == "keep" else "reduce"
    tokens, rope_tokens = run or (None, None)
    config = read_config(folder, tokens=tokens, rope_tokens=rope_tokens)
    source = ModelSource(describe(folder, head), config, meshes, getattr(torch, dtype), accumulation, compiled)
    return FsdpBackend(source, settings)


def describe(folder: Path, head: str = "vocabulary") -> Any:
    shape = describe_model(folder)
    return shape.with_value_head if head == "value" else shape


def try_cases(references: dict[str, Path], cases: Sequence[Case]) -> list[Distance]:
    """Distance of each case. Runs on every rank of a job."""
    return [distance(references[case.kind], case) for case in cases]


def distance(reference: Path, case: Case) -> Distance:
    """Trains the reference's model beside it. Runs on every rank of a job."""
    results = torch.load(reference / "results.pt")
    backend = make_backend(reference / "start", case, optimizer_section())
    batches, apart = batches_of(backend), [0.0, 0.0]
    for batch, stats in zip(batches, backend.log_probs(batches, 1.0), strict=True):
        logits = torch.cat([results["logits"][i] for i in batch.sample_ids]).log_softmax(-1)
        expected = logits.gather(-1, batch.targets[:, None])[:, 0]
        entropy = -(logits.exp() * logits).sum(-1)
        for place, (ours, theirs) in enumerate(((stats.log_probs, expected), (stats.entropy, entropy))):
            apart[place] = max(apart[place], float(((ours - theirs) * batch.mask).abs().max()))
    numbers = train(backend, STEPS)
    relative = [
        [abs(a - b) / b for a, b in zip(ours, theirs, strict=True)]
        for ours, theirs in zip(numbers, results["numbers"], strict=True)
    ]
    weight = max(
        float((ours - theirs).abs().max()) for ours, theirs in beside(backend.full_tensors(), reference / "end")
    )
    return Distance(*apart, max(x[0] for x in relative), max(x[1] for x in relative), weight)


def passes_remembered(reference: Path) -> tuple[int, int]:
    """Forward passes of modules that FSDP remembers, in their order and by module, after some without gradient."""
    backend = make_backend(reference / "start")
    for _ in range(2):
        backend.log_probs(batches_of(backend), 1.0)
    groups = sharded_model_of(backend).module._get_fsdp_state()._fsdp_param_groups
    return len(groups[0].comm_ctx.post_forward_order), sum(len(group._post_forward_indices) for group in groups)


def count_recomputed(folder: Path, memories: Sequence[dict[str, Any]]) -> list[dict[str, int]]:
    """How often each part of the first layer runs in an update of one microbatch, for each memory section."""
    return [_count(folder, memory) for memory in memories]


def _count(folder: Path, memory: dict[str, Any]) -> dict[str, int]:
    backend, counts = make_backend(folder, Case("", memory=memory), optimizer_section()), Counter[str]()
    layers = sharded_model_of(backend).layers
    for name, module in layers[0].named_modules():
        if name:
            module.register_forward_pre_hook(lambda *_, name=name: counts.update([name]))
    attend = attention_interface.attend
    try:
        attention_interface.attend = lambda *args: counts.update(["attention"]) or attend(*args)
        backend.train(batches_of(backend)[:1], negative_log_likelihood, TOKENS, 1.0, 1e-3)
    finally:
        attention_interface.attend = attend
    return {**counts, "attention": counts["attention"] // len(layers)}


def compiled_graphs(references: dict[str, Path], tried: Sequence[Case]) -> list[tuple[Distance, dict[str, int]]]:
    """Distance of each compiled case, and the number of graphs of each function, and of breaks in them."""
    found = []
    for case in tried:
        torch._dynamo.reset()
        utils.counters.clear()
        utils.clear_compilation_metrics()
        found_distance = distance(references[case.kind], case)
        graphs = Counter(entry.co_name for entry in utils.get_compilation_metrics())
        found.append((found_distance, {**graphs, "breaks": sum(utils.counters["graph_break"].values())}))
    return found
