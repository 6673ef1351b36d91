"""Syncs weights from real Megatron layouts to real engines, and compares with engines that load them from disk.

``python -m tests.helpers.weight_syncs`` runs every family in every pair of layouts below; tests run some of them.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from rlhpc.config.schema import ReshardSection
from rlhpc.parallel.compat import device
from rlhpc.reshard.manager import Job, ReshardManager
from rlhpc.reshard.plan import lower_bound
from rlhpc.reshard.sides import sync_sides
from rlhpc.sharding.engine_shards import EngineLayout
from tests.helpers import equality
from tests.helpers.distributed import run_ranks
from tests.helpers.equality import Case
from tests.helpers.tiny_models import make_model
from tests.rollout import engines
from tests.rollout.engines import CHANGES, CONTEXT, VOCAB

WORLD_SIZE = 4
FAMILIES = ("llama", "qwen2", "qwen2_tied", "qwen3", "mixtral", "qwen3moe", "dsv3")


@dataclass(frozen=True)
class Pair:
    """A training layout on four ranks and the engines' tensor-parallel size."""

    case: Case
    rollout_tp: int
    expert_parallel: bool = False

    def __str__(self) -> str:
        return f"{self.case} -> tp={self.rollout_tp}" + (" by experts" if self.expert_parallel else "")


@dataclass(frozen=True)
class Outcome:
    """``tokens``: equal greedy tokens; ``gap``: maximum log-prob difference; bytes of this rank, and their minimum."""

    tokens: bool
    gap: float
    received: int
    least: int

    @property
    def is_exact(self) -> bool:
        return self.tokens and self.gap == 0.0 and self.received == self.least


def pairs_of(kind: str) -> list[Pair]:
    """At least twelve pairs: tp 1 to 4, pp, vpp, cp, dp, and for experts ep and etp, to engines of tp 1, 2 and 4."""
    layouts: list[tuple[dict[str, Any], int]] = [
        ({}, 1),
        ({}, 4),
        ({"tp": 2}, 1),
        ({"tp": 2}, 2),
        ({"tp": 4}, 1),
        ({"tp": 4}, 4),
        ({"pp": 2}, 2),
        ({"tp": 2, "pp": 2}, 4),
        ({"tp": 2, "pp": 2}, 1),
        ({"pp": 2, "vpp": 2}, 4),
        ({"pp": 2, "first_stage_layers": 1, "last_stage_layers": 3}, 1),
        ({"tp": 2, "cp": 2}, 2),
    ]
    if kind in ("mixtral", "qwen3moe", "dsv3"):
        layouts += [
            ({"ep": 4}, 1),
            ({"ep": 4}, 4),
            ({"tp": 2, "ep": 2}, 2),
            ({"tp": 2, "ep": 2, "etp": 2}, 4),
            ({"tp": 2, "pp": 2, "ep": 2}, 2),
            ({"tp": 4, "etp": 4}, 2),
        ]
    return [Pair(Case(kind, **axes), tp) for axes, tp in layouts]


def make_models(folder: Path, kinds: Sequence[str]) -> Path:
    """Write ``<kind>/<a|b>``: two sets of weights per family that both Megatron and vLLM's CPU build support."""
    for kind in kinds:
        for seed, letter in enumerate("ab"):
            changes = {"vocab_size": VOCAB, "max_position_embeddings": CONTEXT, **CHANGES.get(kind, {})}
            make_model(folder / kind / letter, kind, seed, num_hidden_layers=4, **changes)
    return folder


def try_pairs(models: Path, pairs: Sequence[Pair]) -> list[Outcome]:
    """Outcomes of syncing each training layout to an engine of each family and size. Runs on every rank."""
    outcomes: dict[Pair, Outcome] = {}
    for kind, tp, by_experts in dict.fromkeys((p.case.kind, p.rollout_tp, p.expert_parallel) for p in pairs):
        equality.leave_former()
        stock = {letter: engines.stock_greedy(models / kind / letter, tp) for letter in "ab"}
        engine = engines.build(models / kind / "a", tp, **({"expert_parallel": True} if by_experts else {}))
        equality.keep_groups()
        group = [p for p in pairs if (p.case.kind, p.rollout_tp, p.expert_parallel) == (kind, tp, by_experts)]
        for number, pair in enumerate(group):
            letter = "ab"[number % 2]  # weights that the engine does not have yet
            outcomes[pair] = _weight_sync(models / kind / letter, pair, engine, stock[letter])
        engine.shutdown()
    return [outcomes[pair] for pair in pairs]


def make_manager(actor: Any, engine: Any, pair: Pair, *, ranks_per_node: int = 2, **section: Any) -> Any:
    """A manager for the pair's layouts on all ranks, with small buckets and verification at every weight sync."""
    cut = EngineLayout(pair.rollout_tp, pair.expert_parallel)
    options = ReshardSection(**{"bucket_mib": 1, "verify": "always", **section})
    job = Job(ranks_per_node, actor.weights.dtype, device())
    return ReshardManager(actor, engine, sync_sides(actor.weights.shape, actor.layout, cut), options, job)


def _weight_sync(folder: Path, pair: Pair, engine: Any, stock: Any) -> Outcome:
    actor = equality.actor(folder, pair.case)
    manager = make_manager(actor, engine, pair)
    with manager:
        found = engines.greedy(engine)
    gap = max(
        abs(a - b)
        for (_, ours), (_, theirs) in zip(found, stock, strict=True)
        for a, b in zip(ours, theirs, strict=True)
    )
    rank = dist.get_rank()
    least = lower_bound(manager.sides.source, manager.sides.target, itemsize=4)[rank]
    tokens = [tokens for tokens, _ in found] == [tokens for tokens, _ in stock]
    return Outcome(tokens, gap, manager.plan.traffic[rank].received, least)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kinds", nargs="+", default=list(FAMILIES))
    options = parser.parse_args()
    wrong = 0
    with tempfile.TemporaryDirectory() as name:
        for kind in options.kinds:
            pairs = pairs_of(kind)
            models = make_models(Path(name), [kind])
            ranks = run_ranks(try_pairs, WORLD_SIZE, models, pairs, timeout=3600)
            for pair, row in zip(pairs, zip(*ranks, strict=True), strict=True):
                exact = all(outcome.is_exact for outcome in row)
                wrong += not exact
                received = sum(outcome.received for outcome in row) / 2**20
                print(
                    f"{pair}: log-probs differ by {max(o.gap for o in row):.1e}, {received:.2f} MiB moved"
                    f"{'' if exact else '  <-- not exact'}",
                    flush=True,
                )
    print("every pair exact" if not wrong else f"{wrong} pairs are not exact")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    from tests.helpers import weight_syncs  # ranks look functions up by their module's name

    weight_syncs.main()
