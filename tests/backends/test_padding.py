"""Padding adds nothing to the routers' losses, biases and counts: a layout equals one rank on the same microbatches.

``python -m tests.backends.test_padding`` tries 30 random ragged batches and layouts, and prints a table.
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.distributed import run_ranks
from tests.helpers.equality import LAYERS, Case, actor, gradients
from tests.helpers.tiny_models import make_model
from tests.helpers.training import negative_log_likelihood, optimizer_section

pytestmark = pytest.mark.ranks

RANKS = 4
FIRST = {"qwen3moe": 0, "dsv3": 1}  # layer with experts
EXPERTS = {"qwen3moe": 4, "dsv3": 8}
LAYOUTS: list[dict[str, Any]] = [
    {"ep": 4},
    {"ep": 2, "expert_dispatch": "allgather"},
    {"tp": 2, "ep": 2},
    {"tp": 2, "pp": 2},
    {"tp": 4, "etp": 2, "ep": 2},
    {"tp": 2, "cp": 2, "ep": 4, "expert_dispatch": "allgather"},
    {"cp": 2, "etp": 2},
    {"cp": 2, "ep": 2, "cp_method": "ulysses"},
    {"pp": 2, "vpp": 2},
    {"pp": 2, "vpp": 2, "tp": 2, "ep": 2},
    {"pp": 2, "vpp": 2, "ep": 2, "expert_dispatch": "allgather"},
    {"pp": 2, "cp": 2, "etp": 2, "ep": 1},
]


@dataclass(frozen=True)
class Trial:
    """A model, a layout and microbatches of ragged sequences, of which data-parallel ranks get different numbers."""

    case: Case
    zero_row: bool  # the row of the vocabulary that padding has
    replay: bool
    recompute: dict[str, Any]
    seed: int

    def microbatches(self) -> list[list[np.ndarray]]:
        rng = np.random.default_rng(self.seed)
        counts = rng.integers(1, 4, size=rng.integers(3, 6))
        return [[rng.integers(2, 64, size=rng.integers(2, 30)) for _ in range(count)] for count in counts]


def trials(count: int, seed: int = 0) -> list[Trial]:
    rng = random.Random(seed)
    found = []
    for number in range(count):
        kind = rng.choice(list(FIRST))
        recompute = rng.choice(
            [{}, {"recompute": "full"}, {"recompute": "selective", "recompute_modules": ["moe"]}],
        )
        case = Case(kind, **LAYOUTS[(5 * number) % len(LAYOUTS)])
        found.append(Trial(case, rng.random() < 0.5, rng.random() < 0.3, recompute, seed + number))
    return found


@dataclass(frozen=True)
class Result:
    """One update: equal on every rank."""

    counts: dict[int, np.ndarray]  # of each layer: tokens of each expert, sum of entropies, tokens
    norm: float
    gradients: dict[str, np.ndarray]
    biases: dict[str, np.ndarray]
    gauges: dict[str, float]


def update(folder: Path, trial: Trial) -> Result:
    import torch.distributed as dist

    from rlhpc.backends.megatron.experts import routers_of
    from rlhpc.config.training import MemorySection, MoeSection

    case = trial.case if dist.get_world_size() > 1 else Case(trial.case.kind)
    section = MoeSection(aux_loss=0.05, bias_update_rate=0.01 if case.kind == "dsv3" else 0.0)
    backend = actor(_model(folder, trial), case, optimizer_section(), section, MemorySection(**trial.recompute))
    before, counts = dict(_biases(backend)), {}
    for router in routers_of(backend.models):
        router.register_forward_hook(lambda router, *_: counts.update({router.layer_number: router.counts.clone()}))
    stats = backend.train(_batches(trial, backend.layout), negative_log_likelihood, 100.0, 1.0, 1e-3)
    found = {name: gradient.numpy().copy() for name, gradient in gradients(backend)}
    moved = {name: bias - before[name] for name, bias in _biases(backend)}
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, {layer: one.numpy() for layer, one in counts.items()})
    layers = sorted({layer for one in every for layer in one})
    sums = {layer: sum(one[layer] for one in every if layer in one) for layer in layers}
    return Result(sums, stats.grad_norm, found, moved, stats.gauges)


def _model(folder: Path, trial: Trial) -> Path:
    """The trial's model, with row 0 of the embeddings zero or any other id's."""
    from safetensors.torch import load_file, save_file

    made = folder / f"{trial.case.kind}-{trial.seed}"
    if not made.exists():
        make_model(made, trial.case.kind, num_hidden_layers=LAYERS)
        tensors = load_file(made / "model.safetensors")
        rows = tensors["model.embed_tokens.weight"]
        rows[0] = 0 if trial.zero_row else rows[2 + trial.seed % 60]
        save_file(tensors, made / "model.safetensors", metadata={"format": "pt"})
    return made


def _batches(trial: Trial, layout: Any) -> list[Any]:
    """This rank's microbatches, and blank ones for ranks with fewer."""
    import torch.distributed as dist

    from rlhpc.data.collate import pack_batch
    from rlhpc.trainer.batches import filled

    every, coord = trial.microbatches(), layout.coord(dist.get_rank())
    places, first = layout.layer_places(LAYERS), FIRST[trial.case.kind]
    own = tuple(n for n, layer in enumerate(range(first, LAYERS)) if places[layer][0] == coord["pp"])

    def make(ids: Sequence[int]) -> Any:
        (number,) = ids
        sequences = every[number]
        routed = [_routed(trial, number, len(one))[:, own] for one in sequences] if trial.replay else None
        batch = pack_batch([(s, 1) for s in sequences], sample_ids=range(len(sequences)), routed_experts=routed)
        return replace(batch, routed_layers=own) if trial.replay else batch

    rounds = -(-len(every) // layout.dp)
    mine = list(range(len(every)))[coord["dp"] :: layout.dp]
    return list(filled([[number] for number in mine] + [[]] * (rounds - len(mine)), make))


def _routed(trial: Trial, number: int, length: int) -> np.ndarray:
    rng = np.random.default_rng((trial.seed, number, length))
    scores = rng.random((length - 1, LAYERS - FIRST[trial.case.kind], EXPERTS[trial.case.kind]))
    return scores.argsort(axis=-1)[..., :2].astype(np.uint8)


def _biases(backend: Any) -> Iterator[tuple[str, np.ndarray]]:
    for name, tensor in backend.full_tensors():
        if name.endswith("e_score_correction_bias"):
            yield name, tensor.clone().numpy()


def updates(folder: Path, tried: Sequence[Trial]) -> list[Result]:
    return [update(folder, trial) for trial in tried]


def compare(folder: Path, tried: Sequence[Trial]) -> list[float]:
    """Largest relative distance of each trial from one rank, infinite where counts differ."""
    for trial in tried:
        _model(folder, trial)
    (one,) = run_ranks(updates, 1, folder, tried)
    several = run_ranks(updates, RANKS, folder, tried)
    return [max(_distance(ranks[i], one[i]) for ranks in several) for i in range(len(tried))]


def _distance(found: Result, expected: Result) -> float:
    exact = all(
        (found.counts[layer][:-2] == counts[:-2]).all() and found.counts[layer][-1] == counts[-1]
        for layer, counts in expected.counts.items()
    )
    if (
        not exact
        or found.counts.keys() != expected.counts.keys()
        or found.gradients.keys() != expected.gradients.keys()
    ):
        return float("inf")
    entropies = [abs(found.counts[layer][-2] / counts[-2] - 1) for layer, counts in expected.counts.items()]
    gauges = [abs(found.gauges[name] - value) for name, value in expected.gauges.items()]
    largest = max(float(np.abs(one).max()) for one in expected.gradients.values())
    apart = [float(np.abs(found.gradients[name] - one).max()) / largest for name, one in expected.gradients.items()]
    biases = [float(np.abs(found.biases[name] - one).max()) for name, one in expected.biases.items()]
    return max(abs(found.norm / expected.norm - 1), *entropies, *gauges, *apart, *biases)


def test_padding_adds_nothing_to_what_routers_learn_and_count(tmp_path: Path) -> None:
    assert max(compare(tmp_path, TIER)) < 1e-5


# Blank microbatches, tensor parallelism, equal lengths for all-gather, and an interleaved pipeline's round.
TIER = [
    Trial(Case("qwen3moe", ep=4), True, False, {}, 100),
    Trial(Case("dsv3", tp=2, cp=2, ep=4, expert_dispatch="allgather"), True, False, {"recompute": "full"}, 101),
    Trial(Case("qwen3moe", tp=2, pp=2, vpp=2, ep=2), True, True, {}, 102),
    Trial(Case("dsv3", cp=2, etp=2), False, False, {}, 103),
]


def main() -> None:
    tried = trials(30)
    with tempfile.TemporaryDirectory() as name:
        distances = compare(Path(name), tried)
    for trial, distance in zip(tried, distances, strict=True):
        print(f"{distance:.1e} {trial}")
    print(f"{sum(distance < 1e-5 for distance in distances)} of {len(tried)} as one rank")
    sys.exit(max(distances) >= 1e-5)


if __name__ == "__main__":
    from tests.backends import test_padding  # ranks look functions up by their module's name

    test_padding.main()
