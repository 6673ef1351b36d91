"""Compares memory of FSDP2 ranks with the plan: shards, gradients and moments to the byte, and what autograd stores.

``python -m tests.helpers.fsdp_memory`` runs every family and setting on real ranks, and prints a table.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rlhpc.api import LossSums
from rlhpc.backends.fsdp import attention_interface
from rlhpc.config.model_settings import ModelSettings
from rlhpc.config.training import MemorySection, ParallelSection
from rlhpc.data.collate import pack_batch
from rlhpc.plan.estimates.fsdp_activations import FsdpSetting, stored_activations
from rlhpc.plan.estimates.fsdp_memory import make_fsdp_model
from rlhpc.plan.estimates.fsdp_parameters import fsdp_state, parameter_groups
from rlhpc.plan.estimates.rank_memory import Tokens
from tests.backends.fsdp.backend_cases import bare_backend
from tests.helpers.activation_memory import print_differences
from tests.helpers.distributed import run_ranks
from tests.helpers.live_memory import LiveStorages
from tests.helpers.parts import bytes_by_storage, key_of, sharded_model_of
from tests.helpers.tiny_models import make_model
from tests.helpers.training import optimizer_section

# Few of these divide by a number of ranks. 3 experts over 4 ranks: one has none.
STATE_SIZES: dict[str, Any] = {"vocab_size": 71, "hidden_size": 72, "intermediate_size": 136}
FEW_EXPERTS = {"num_experts": 3}
# Wide enough that activations dominate over indices.
SIZES: dict[str, Any] = {"num_hidden_layers": 3, "hidden_size": 256, "intermediate_size": 512}
# The largest is the weights' share of an update, not of activations.
PEAK_SIZES: dict[str, Any] = {"num_hidden_layers": 6, "hidden_size": 256, "intermediate_size": 1024, "vocab_size": 2048}
FAMILIES = ("llama", "qwen2", "qwen3", "mixtral", "qwen3moe", "dsv3", "dsv3_direct")
FULL = (("recompute", "full"),)
SELECTIVE = (("recompute", "selective"), ("recompute_modules", ["core_attn", "mlp", "moe", "shared_experts"]))
LENGTHS = (128, 128)  # of documents: equal ones need no padding


@dataclass(frozen=True)
class FsdpCase:
    """A model on a mesh with ``copies`` of the weights and ``cp``. ``optimizer`` None: it is frozen."""

    kind: str
    cp: int = 1
    copies: int = 1
    dtype: str = "bfloat16"
    memory: tuple[tuple[str, Any], ...] = ()
    cp_method: str = "auto"
    head: str = "vocabulary"
    optimizer: str | None = "adamw"

    def __str__(self) -> str:
        words = [f"{name}={value}" for name, value in self.memory]
        sizes = [f"cp={self.cp} {self.cp_method}"] if self.cp > 1 else []
        sizes += [f"copies={self.copies}"] if self.copies > 1 else []
        return " ".join([self.kind, *sizes, self.dtype, self.head, str(self.optimizer), *words])


def folders_for(folder: Path, cases: Sequence[FsdpCase], sizes: dict[str, Any]) -> dict[str, Path]:
    """Saves the models of the cases."""
    kinds = {case.kind for case in cases}
    return {kind: make_model(folder / kind, kind, **{**sizes, **_own(kind, sizes)}) for kind in kinds}


def _own(kind: str, sizes: dict[str, Any]) -> dict[str, Any]:
    if kind == "gemma2":  # else a CPU stores scores, which the kernels of a GPU do not
        return {"attn_logit_softcapping": None}
    if kind == "llama3":  # moments in 8 bits have blocks of 256
        return {"hidden_size": 128, "intermediate_size": 512}
    return FEW_EXPERTS if kind == "qwen3moe" and sizes is STATE_SIZES else {}


def state_bytes(folders: dict[str, Path], cases: Sequence[FsdpCase]) -> list[tuple[dict[str, int], dict[str, int]]]:
    """(measured, predicted) bytes of a rank for each case. Runs on every rank of a job."""
    return [_state(folders[case.kind], case) for case in cases]


def _state(folder: Path, case: FsdpCase) -> tuple[dict[str, int], dict[str, int]]:
    backend = _backend(folder, case)
    measured = {}
    if case.optimizer is None:
        backend.log_probs([_batch()], 1.0)
    else:
        _differentiate(backend)
        gradients = [parameter.grad for parameter in sharded_model_of(backend).module.parameters()]  # empty ones, too
        measured["gradients"] = _bytes([gradient.to_local() for gradient in gradients])
        measured["moments"] = _bytes(_plain(backend._device_tensors("optimizer")))
    parameters = [parameter.to_local() for parameter in sharded_model_of(backend).module.parameters()]
    found = fsdp_state(
        parameter_groups(backend.shape),
        sharded_model_of(backend).meshes.sizes,
        dist.get_rank(),
        case.dtype,
        case.optimizer,
    )
    predicted = {"parameters": found.parameters}
    if case.optimizer is not None:
        predicted |= {"gradients": found.gradients, "moments": found.moments}
    return {"parameters": _bytes(parameters), **measured}, predicted


def activation_bytes(folders: dict[str, Path], cases: Sequence[FsdpCase]) -> list[tuple[int, int]]:
    """(measured, predicted) bytes of a rank for each case. Runs on every rank of a job."""
    return [_activations(folders[case.kind], case) for case in cases]


def _activations(folder: Path, case: FsdpCase) -> tuple[int, int]:
    backend = _backend(folder, case)
    memory, parallel = MemorySection(**dict(case.memory)), ParallelSection(cp=case.cp, cp_method=case.cp_method)
    setting = FsdpSetting(backend.shape, case.cp, parallel, memory, case.dtype, kernels="padded")
    stored = stored_activations(setting, -(-sum(LENGTHS) // case.cp))
    return stored_bytes(backend), stored.total


def update_peaks(folders: dict[str, Path], cases: Sequence[FsdpCase]) -> list[tuple[int, int]]:
    """(measured, predicted) bytes at the peak of an update's passes for each case, without optimizer."""
    return [_update_peak(folders[case.kind], case) for case in cases]


def _update_peak(folder: Path, case: FsdpCase) -> tuple[int, int]:
    backend, memory = _backend(folder, case), MemorySection(**dict(case.memory))
    tokens = sum(LENGTHS) // case.cp
    parallel = ParallelSection(cp=case.cp, dp_replicate=case.copies)
    setting = FsdpSetting(backend.shape, case.cp, parallel, memory, case.dtype, kernels="padded")
    sizes = sharded_model_of(backend).meshes.sizes
    model = make_fsdp_model("actor", setting, sizes, dist.get_rank(), Tokens(tokens, tokens, 2), case.optimizer)
    with LiveStorages() as live:
        _differentiate(backend, 2)
    return live.peak, model.state.parameters + model.gradients + sum(model.update_parts.values())


def _backend(folder: Path, case: FsdpCase) -> Any:
    parallel = ParallelSection(dp_replicate=case.copies, cp=case.cp, cp_method=case.cp_method)
    section = None if case.optimizer is None else optimizer_section(name=case.optimizer)
    settings = ModelSettings(parallel, MemorySection(**dict(case.memory)), optimizer=section)
    backend = bare_backend(folder, settings, head=case.head, dtype=case.dtype)
    backend.load_pretrained(folder)
    return backend


def _batch() -> Any:
    generator = torch.Generator().manual_seed(3)
    made = [torch.randint(2, 60, (length,), generator=generator).numpy() for length in LENGTHS]
    return pack_batch([(tokens, 1) for tokens in made], sample_ids=list(range(len(made))))


def _differentiate(backend: Any, microbatches: int = 1) -> None:
    """Leaves gradients at the parameters."""

    def loss(stats: Any, batch: Any) -> Any:
        values = stats.values if hasattr(stats, "values") else stats.log_probs
        total = -(values * batch.loss_weight).sum()
        return LossSums(total, {"loss": total.detach()})

    backend._differentiate([_batch()] * microbatches, loss, 100.0, 1.0)


def _plain(tensors: Sequence[Any]) -> list[Any]:
    """The tensors that contain numbers: several of one in 8 bits."""
    return [
        part
        for tensor in tensors
        for part in ((tensor.codes, tensor.scale, tensor.qmap) if hasattr(tensor, "qmap") else (tensor,))
    ]


def _bytes(tensors: Sequence[Any]) -> int:
    """Bytes of the unique storages."""
    return sum(bytes_by_storage(tensors).values())


def stored_bytes(backend: Any) -> int:
    """Bytes of unique storages that autograd and recomputation hold between forward and backward pass, but weights."""
    module, found = sharded_model_of(backend).module, dict[int, torch.Tensor]()

    def take(tensor: Any) -> None:
        if torch.is_tensor(tensor) and tensor.is_floating_point() and not _is_weight(module, tensor):
            found.setdefault(key_of(tensor.untyped_storage()), tensor)  # alive: no other storage takes its place

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point():  # indices and masks are held, too
            found.setdefault(key_of(tensor.untyped_storage()), tensor)
        take(tensor)
        return tensor

    def before(_: Any, inputs: Any, options: Any) -> None:
        for tensor in torch.utils._pytree.tree_leaves((inputs, options)):
            take(tensor)

    handles = [
        part.register_forward_pre_hook(before, with_kwargs=True)
        for part in module.modules()
        if isinstance(part.forward, functools.partial) and part is not sharded_model_of(backend).head
    ]
    original = attention_interface._recomputed

    def recomputed(*arguments: Any) -> Any:
        before(None, arguments, {})
        return original(*arguments)

    attention_interface._recomputed = recomputed
    try:
        with _forward_only(backend), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            _differentiate(backend)
    finally:
        attention_interface._recomputed = original
        for handle in handles:
            handle.remove()
    return sum(tensor.untyped_storage().nbytes() for tensor in found.values())


class _Forward(Exception):
    """Ends a pass before its backward pass."""


class _forward_only:
    """Context in which a pass ends when its loss is computed."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def __enter__(self) -> None:
        def end(*_: Any, **__: Any) -> None:
            raise _Forward

        self._original, torch.Tensor.backward = torch.Tensor.backward, end

    def __exit__(self, kind: Any, *_: Any) -> bool:
        torch.Tensor.backward = self._original
        sharded_model_of(self._backend).reshard()
        return kind is _Forward


def _is_weight(module: Any, tensor: Any) -> bool:
    weights = list(module.parameters())
    storages = {key_of(weight.untyped_storage()) for weight in weights if not hasattr(weight, "to_local")}
    return any(tensor is weight for weight in weights) or key_of(tensor.untyped_storage()) in storages


def cases_by_world() -> dict[int, list[FsdpCase]]:
    """Cases of families, dtypes, recomputation and exchanges, by number of ranks."""
    plain = [FsdpCase(kind, dtype=dtype) for kind in FAMILIES for dtype in ("bfloat16", "float32")]
    again = [replace(case, memory=memory) for case in plain for memory in (FULL, SELECTIVE)]
    values = [replace(case, head="value") for case in plain[:4]]
    split = [replace(case, cp=2, cp_method=method) for case in plain for method in ("auto", "all_gather")]
    return {1: plain + again + values, 2: split}


def main() -> None:
    worst = 0.0
    with tempfile.TemporaryDirectory() as name:
        for world, cases in cases_by_world().items():
            folders = folders_for(Path(name) / str(world), cases, SIZES)
            ranks = run_ranks(activation_bytes, world, folders, cases)
            worst = max(worst, print_differences(cases, ranks))
    print(f"worst {worst:.1%}")


if __name__ == "__main__":
    from tests.helpers import fsdp_memory  # ranks import it by this name

    fsdp_memory.main()
