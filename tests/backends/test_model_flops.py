"""FLOPs of whole updates of the real model: torch's counter beside the planner's count from shape and lengths."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from rlhpc.api import LossSums, TokenValues
from rlhpc.backends.kernels.segments import Segments
from rlhpc.config.training import MemorySection
from rlhpc.data.collate import pack_batch
from rlhpc.models import ModelShape, read_model
from rlhpc.models.flops import forward_terms, training_flops
from rlhpc.plan.estimates.workload import SequenceLengths, update_work
from tests.helpers.distributed import run_ranks
from tests.helpers.tiny_models import make_model
from tests.helpers.training import make_actor, optimizer_section

pytestmark = pytest.mark.ranks

PACKED = (96, 200, 96, 200)  # equal lengths share a call without padding
UNEQUAL = (100, 80, 200, 190, 350)  # similar lengths share a call, padded to the longest
WAYS: dict[str, dict[str, Any]] = {
    "none": {},
    "full": {"recompute": "full"},
    "full, in pairs": {"recompute": "full", "recompute_layers": 2},
    "core_attn": {"recompute": "selective", "recompute_modules": ["core_attn"]},
    "mlp": {"recompute": "selective", "recompute_modules": ["mlp"]},
    "moe": {"recompute": "selective", "recompute_modules": ["moe"]},
    "shared_experts": {"recompute": "selective", "recompute_modules": ["shared_experts"]},
}
FEW = [
    (kind, lengths, way)
    for kind in ("qwen3", "qwen3moe", "dsv3")
    for lengths, way in (((512,), "none"), (PACKED, "none"), ((512,), "full"))
]
MORE = [
    *[(kind, (512,), way) for kind in ("qwen3", "qwen3moe", "dsv3") for way in list(WAYS)[2:]],
    *[(kind, (512,), "none") for kind in ("llama", "qwen2_tied", "mixtral", "dsv3_direct")],
    *[(kind, UNEQUAL, way) for kind in ("qwen3", "dsv3") for way in ("none", "full")],
]
Case = tuple[str, tuple[int, ...], str]


def test_an_update_has_the_planners_flops(tmp_path: Path) -> None:
    check(tmp_path, FEW)


@pytest.mark.long
def test_further_families_and_recomputed_modules(tmp_path: Path) -> None:
    check(tmp_path, MORE)


@pytest.mark.long
def test_a_critic_has_a_head_of_one_row(tmp_path: Path) -> None:
    check(tmp_path, [("qwen3", (512,), "none"), ("dsv3", PACKED, "full")], value_head=True)


def check(folder: Path, cases: list[Case], *, value_head: bool = False) -> None:
    """Compares each case: matrix products within 0.1%, attention on unpadded values within 1%."""
    models = {kind: make_model(folder / kind, kind, num_hidden_layers=4) for kind, _, _ in cases}
    (counted,) = run_ranks(_count, 1, models, cases, "value" if value_head else "vocabulary")
    for case, found in zip(cases, counted, strict=True):
        kind, lengths, way = case
        shape = read_model(models[kind])
        planned = _planned(shape.with_value_head if value_head else shape, lengths, MemorySection(**WAYS[way]))
        triangles = sum(length * (length + 1) / 2 for length in lengths) / _squares(lengths)
        assert found["products"] == pytest.approx(planned["products"], rel=1e-3), case
        for part in ("attention", "backward"):
            assert found[part] * triangles == pytest.approx(planned[part], rel=0.01), (case, part)


def _squares(lengths: tuple[int, ...]) -> int:
    """Pairs of tokens that attention without a fused kernel computes: whole squares, padded within a call."""
    segments = Segments(np.array(lengths), np.array(lengths), torch.device("cpu"))
    squares = sum(bucket.query_rows.size(0) * bucket.query_rows.size(1) ** 2 for bucket in segments.buckets)
    assert (squares == sum(length * length for length in lengths)) == (lengths != UNEQUAL)
    return squares


def _planned(shape: ModelShape, lengths: tuple[int, ...], memory: MemorySection) -> dict[str, float]:
    """Products, and attention's forward and backward passes, of an update with all that is computed twice."""
    sizes = SequenceLengths.of(lengths)
    of_token, of_pair = forward_terms(shape)
    update = update_work(shape, memory, sizes)
    assert update.flops == training_flops(shape, lengths)
    again = memory.recompute == "full" or (memory.recompute == "selective" and "core_attn" in memory.recompute_modules)
    scores = 2 * shape.num_layers * shape.num_heads * shape.head_dim * sizes.pairs  # the backward pass makes them again
    attention, backward = (1 + again) * of_pair * sizes.pairs, 2 * of_pair * sizes.pairs + scores
    products = update.flops + update.repeated - attention - backward
    if shape.head != "value":  # logits, and both gradients, of tokens with a next one alone; logits twice
        products -= 4 * 2 * shape.vocab_size * shape.hidden_size * len(lengths)
    assert products >= 3 * of_token * sizes.tokens
    return {"products": products, "attention": attention, "backward": backward}


def _count(models: dict[str, Path], cases: list[Case], head: str) -> list[dict[str, float]]:
    return [_count_one(models[kind], lengths, way, head) for kind, lengths, way in cases]


def _count_one(folder: Path, lengths: tuple[int, ...], way: str, head: str) -> dict[str, float]:
    """What torch counts in one update of an actor or, with a value head, of a critic."""
    shape = read_model(folder)
    memory, random = MemorySection(**WAYS[way]), np.random.default_rng(0)
    model = make_actor(folder, optimizer_section(), memory, head=head)
    sequences = [(random.integers(0, shape.vocab_size, length), 1) for length in lengths]
    batch = pack_batch(sequences, sample_ids=range(len(lengths)))
    attention = {"attention": 0, "backward": 0}
    value_dim = shape.latent.value_dim if shape.latent else shape.head_dim
    counter = FlopCounterMode(display=False, custom_mapping=_formulas(value_dim, attention))
    # Modules do not matter here, and torch's tracker of them fails on views that a recomputed forward pass takes.
    counter.mod_tracker = mock.MagicMock(parents={"Global"})
    with counter:
        model.train([batch], _loss, float(sum(lengths)), 1.0, 1e-6)
    return {"products": counter.get_total_flops() - sum(attention.values()), **attention}


def _formulas(value_dim: int, attention: dict[str, int]) -> dict[Any, Any]:
    """Formulas of the operations on a CPU that torch's counter does not know; adds attention's to ``attention``.

    Values there are as long as the model's, without the zeros that extend them to the keys' length.
    """

    def linear(x: Any, weight: Any, *_: Any, **__: Any) -> int:
        return 2 * math.prod(x) * weight[0]

    def grouped(x: Any, weights: Any, *_: Any, **__: Any) -> int:
        return 2 * x[0] * x[1] * weights[-1]  # of tokens and weights, or the weights' gradient

    def add_product(total: Any, x: Any, *_: Any, **__: Any) -> int:
        return 2 * math.prod(total) * x[1]

    def forward(query: Any, key: Any, *_: Any, **__: Any) -> int:
        flops = 2 * math.prod(query[:3]) * key[2] * (query[3] + value_dim)
        attention["attention"] += flops
        return flops

    def backward(_: Any, query: Any, key: Any, *__: Any, **___: Any) -> int:
        flops = 2 * math.prod(query[:3]) * key[2] * (3 * query[3] + 2 * value_dim)
        attention["backward"] += flops
        return flops

    ops = torch.ops.aten
    found = {
        ops._grouped_mm: grouped,
        ops.addmm_: add_product,
        ops._scaled_dot_product_flash_attention_for_cpu: forward,
        ops._scaled_dot_product_flash_attention_for_cpu_backward: backward,
    }
    if hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        found[torch.ops.mkldnn._linear_pointwise] = linear
    return found


def _loss(stats: Any, batch: Any) -> Any:
    values = stats.values if isinstance(stats, TokenValues) else stats.log_probs
    total = -(values * batch.loss_weight).sum()
    return LossSums(total, {"loss": total.detach()})
