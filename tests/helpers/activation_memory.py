"""Compares predicted activation memory with what autograd saves in real forward passes.

``python -m tests.helpers.activation_memory`` runs models and settings on real ranks, and prints a table.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rlhpc.api import LossSums
from rlhpc.config.training import MemorySection, ParallelSection
from rlhpc.core.rank import RankInfo
from rlhpc.plan.estimates.activations import ActivationSetting, in_flight_activations, stage_activations
from tests.helpers import equality
from tests.helpers.distributed import run_ranks
from tests.helpers.parts import key_of
from tests.helpers.tiny_models import make_model
from tests.helpers.training import make_actor, optimizer_section, packed_batch, separate_gradients

# Wide enough that activations dominate over indices.
SIZES: dict[str, Any] = {"num_hidden_layers": 4, "hidden_size": 256, "intermediate_size": 512}
SELECTIVE = {"recompute": "selective"}
FULL = {"recompute": "full"}


@dataclass(frozen=True)
class ActivationCase:
    kind: str
    axes: tuple[tuple[str, Any], ...] = ()
    memory: tuple[tuple[str, Any], ...] = ()
    dtype: str = "bfloat16"
    lengths: tuple[int, ...] = (128, 128)
    microbatches: int = 1  # several: peak over the schedule

    def __str__(self) -> str:
        pairs = " ".join(f"{key}={value}" for key, value in (*self.axes, *self.memory))
        batches = f" x {self.microbatches}" if self.microbatches > 1 else ""
        return f"{self.kind} {pairs} {self.dtype} {list(self.lengths)}{batches}"


def compare(folders: dict[str, Path], cases: Sequence[ActivationCase]) -> list[tuple[int, int]]:
    """(measured, predicted) bytes of each case. Runs on every rank of a job."""
    return [_compare(folders[case.kind], case) for case in cases]


def _compare(folder: Path, case: ActivationCase) -> tuple[int, int]:
    equality.leave_former()
    memory = MemorySection(**dict(case.memory))
    actor = make_actor(folder, optimizer_section(), memory, case.dtype, **dict(case.axes))
    equality._former.append(actor)
    batch = packed_batch(case.lengths)
    measured = keep(actor, [batch] * case.microbatches)
    layout, stage = actor.layout, actor.layout.coord(RankInfo.from_environ().rank)["pp"]
    setting = ActivationSetting(
        actor.weights.shape, layout, ParallelSection(**dict(case.axes)), memory, case.dtype, kernels="padded"
    )
    tokens = -(-sum(case.lengths) // layout.cp)
    # The batch always holds rotary angles; autograd holds them unless attention is recomputed.
    again = memory.recompute == "full" or setting.recomputes("core_attn")
    held = min(layout.pp - stage, case.microbatches)
    angles = held * stage_activations(setting, stage, tokens).shared if again else 0
    return measured, in_flight_activations(setting, stage, tokens, case.microbatches) - angles


class _Ledger:
    """Storages that autograd holds, with their reference counts and peak bytes."""

    def __init__(self, left_out: set[int]) -> None:
        self.left_out, self.counts, self.held, self.most = left_out, dict[int, int](), 0, 0

    def take(self, storage: Any, change: int) -> None:
        key = key_of(storage)
        if key in self.left_out:
            return
        before = self.counts.get(key, 0)
        self.counts[key] = before + change
        if bool(before) != bool(before + change):
            self.held += change * storage.nbytes()
            self.most = max(self.most, self.held)


class _Held:
    """Stands for a saved tensor until autograd releases it."""

    def __init__(self, tensor: Any, ledger: _Ledger) -> None:
        self.tensor, self.storage, self.ledger = tensor, tensor.untyped_storage(), ledger
        ledger.take(self.storage, 1)

    def __del__(self) -> None:
        self.ledger.take(self.storage, -1)


def keep(actor: Any, batches: Sequence[Any]) -> int:
    """Peak bytes of unique storages that autograd saves in an update's passes, without weights.

    Recomputed tensors do not count: from the first backward pass on, only a forward pass can raise the peak.
    """
    ledger = _Ledger({key_of(param.untyped_storage()) for model in actor.models for param in model.parameters()})

    def pack(tensor: torch.Tensor) -> Any:
        return tensor if torch._C._current_graph_task_id() != -1 else _Held(tensor, ledger)

    def unpack(held: Any) -> torch.Tensor:
        return held.tensor if isinstance(held, _Held) else held

    def loss(stats: Any, batch: Any) -> Any:
        total = -(stats.log_probs * batch.loss_weight).sum()
        return LossSums(total, {"loss": total.detach()})

    separate_gradients(actor)
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        actor.train(batches, loss, 100.0, 1.0, 1e-3)
    return ledger.most


def cases_by_world() -> dict[int, list[ActivationCase]]:
    """Cases of families, dtypes, recomputation and every axis, by number of ranks."""
    full, pairs = (("recompute", "full"),), (("recompute", "full"), ("recompute_layers", 2))
    selective = (("recompute", "selective"),)

    def modules(*names: str) -> tuple[tuple[str, Any], ...]:
        return (*selective, ("recompute_modules", list(names)))

    kinds = ("llama", "qwen2", "qwen3", "mixtral", "qwen3moe", "dsv3", "dsv3_direct")
    one = [ActivationCase(kind, dtype=dtype) for kind in kinds for dtype in ("bfloat16", "float32")]
    one += [ActivationCase(kind, memory=way) for kind in ("qwen3", "dsv3") for way in (selective, full, pairs)]
    one += [ActivationCase(kind, memory=modules("core_attn")) for kind in ("qwen2", "qwen3", "dsv3")]
    one += [ActivationCase("qwen2", memory=modules("mlp")), ActivationCase("qwen3moe", memory=modules("moe"))]
    one += [ActivationCase("dsv3", memory=modules("shared_experts"))]
    one += [ActivationCase("qwen3", lengths=(100, 96, 60, 56, 50)), ActivationCase("qwen2", lengths=(300,))]
    two = [ActivationCase(kind, (("tp", 2),)) for kind in kinds]
    two += [ActivationCase("qwen2", (("tp", 2), ("sequence_parallel", False)))]
    two += [ActivationCase("qwen3", (("tp", 2),), dtype="float32"), ActivationCase("qwen3", (("tp", 2),), selective)]
    two += [ActivationCase("qwen3", (("cp", 2),)), ActivationCase("qwen3", (("cp", 2), ("cp_method", "ulysses")))]
    two += [
        ActivationCase("dsv3", (("cp", 2),)),
        ActivationCase("qwen2", (("pp", 2),)),
        ActivationCase("dsv3", (("pp", 2),)),
    ]
    two += [ActivationCase("qwen3moe", (("ep", 2),)), ActivationCase("qwen3moe", (("etp", 2),))]
    two += [ActivationCase("qwen3moe", (("ep", 2), ("expert_dispatch", "allgather")))]
    four = [
        ActivationCase("qwen3moe", (("tp", 2), ("ep", 2))),
        ActivationCase("dsv3", (("tp", 2), ("cp", 2), ("ep", 4))),
    ]
    four += [ActivationCase("qwen3", (("tp", 2), ("pp", 2))), ActivationCase("llama", (("tp", 2), ("cp", 2)))]
    two += [ActivationCase("qwen2", (("pp", 2),), way, microbatches=4) for way in ((), full)]
    two += [ActivationCase("qwen2", (("pp", 2), ("vpp", 2)), microbatches=4)]
    four += [ActivationCase("qwen3", (("pp", 4),), microbatches=count) for count in (2, 6)]
    four += [ActivationCase("dsv3", (("pp", 2), ("vpp", 2), ("ep", 2)), microbatches=6)]
    return {1: one, 2: two, 4: four}


def print_differences(cases: Sequence[Any], ranks: Sequence[Sequence[Any]]) -> float:
    """Prints (measured, predicted) bytes of each case, summed over ranks; returns the largest relative difference."""
    worst = 0.0
    for case, results in zip(cases, zip(*ranks, strict=True), strict=True):
        # Ranks get unequal numbers of tokens for their experts, so sums are compared.
        measured, predicted = (sum(result[i] for result in results) for i in (0, 1))
        off = predicted / measured - 1
        worst = max(worst, abs(off))
        print(f"{len(ranks)} ranks  {case!s:100} {measured:>12,} {predicted:>12,} {off:+.1%}", flush=True)
    return worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worlds", type=int, nargs="+", default=[1, 2, 4])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        worst = 0.0
        for world_size in options.worlds:
            cases = cases_by_world()[world_size]
            kinds = {case.kind for case in cases}
            folders = {kind: make_model(Path(name) / f"{world_size}-{kind}", kind, **SIZES) for kind in kinds}
            ranks = run_ranks(compare, world_size, folders, cases, timeout=1800)
            worst = max(worst, print_differences(cases, ranks))
        print(f"worst {worst:.1%}")


if __name__ == "__main__":
    from tests.helpers import activation_memory  # ranks import it by this name

    activation_memory.main()
