"""Inputs of recomputed layers that wait in CPU memory: as many bytes as planned, and no bit of a result changes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from rlhpc.config.training import MemorySection, ParallelSection
from rlhpc.plan.estimates.activations import ActivationSetting, in_flight_activations, offloaded_activations
from tests.helpers import equality
from tests.helpers.distributed import run_ranks
from tests.helpers.live_memory import LiveStorages
from tests.helpers.parts import gradient_buffers
from tests.helpers.tiny_models import make_model
from tests.helpers.training import (
    digest,
    make_actor,
    negative_log_likelihood,
    optimizer_section,
    packed_batch,
    train,
    update,
)

pytestmark = pytest.mark.ranks

LAYERS, TOKENS, MICROBATCHES = 8, 512, 4
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {  # kind, layout, memory
    "dp": ("qwen3", {}, {}),
    "pp": ("qwen3", {"pp": 2}, {}),
    "tp": ("qwen3moe", {"tp": 2}, {"recompute_layers": 2}),
    "vpp": ("qwen2_tied", {"pp": 2, "vpp": 2}, {}),
}


Found = list[dict[str, list[dict[str, Any]]]]


@pytest.fixture(scope="module", params=[("dp", "pp"), pytest.param(("tp", "vpp"), marks=pytest.mark.long)], ids=str)
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Found:
    """By rank and case: without and with offload, on two ranks."""
    folder, cases = tmp_path_factory.mktemp("offload"), request.param
    kinds = {CASES[case][0] for case in cases}
    models = {kind: make_model(folder / kind, kind, num_hidden_layers=LAYERS) for kind in kinds}
    return run_ranks(_look, 2, cases, models)


def test_every_bit_of_losses_gradients_and_weights_is_the_same(found: Found) -> None:
    """With microbatches of unequal length."""
    for case, kept, offloaded in _pairs(found):
        for what in ("metrics", "gradients", "steps", "weights"):
            assert offloaded[what] == kept[what], (case, what)


def test_cpu_memory_has_the_bytes_that_are_planned(found: Found) -> None:
    for case, kept, offloaded in _pairs(found):
        assert offloaded["most"] == offloaded["planned"] > 0, case
        assert kept["planned"] == 0, case
        assert offloaded["left"] == 0, (case, "after an update")


def test_the_device_has_what_is_planned_less(found: Found) -> None:
    """Bytes of all tensors at the peak of an update, without those in CPU memory; a gradient more where the peak moves
    to another layer."""
    for case, kept, offloaded in _pairs(found):
        less = kept["stored"] - offloaded["stored"]
        assert less > 0, case
        assert kept["peak"] - offloaded["peak"] >= less - (offloaded["gradient"] if case == "pp" else 0), case


def _pairs(found: Found) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    return ((case, kept, offloaded) for rank in found for case, (kept, offloaded) in rank.items())


def _look(cases: Sequence[str], models: dict[str, Path]) -> dict[str, list[dict[str, Any]]]:
    found = {}
    for case in cases:
        kind, parallel, memory = CASES[case]
        ways = [{"recompute": "full", **memory, "offload_activations": offload} for offload in (False, True)]
        found[case] = [_one(models[kind], parallel, way) for way in ways]
    return found


def _one(model: Path, parallel: dict[str, Any], memory: dict[str, Any]) -> dict[str, Any]:
    equality.leave_former()
    actor = make_actor(model, optimizer_section(), MemorySection(**memory), **parallel)
    equality._former.append(actor)
    with LiveStorages() as live:
        actor.differentiate([packed_batch([100, TOKENS - 100])] * MICROBATCHES, negative_log_likelihood, 100.0, 1.0)
    found: dict[str, Any] = _planned(actor, parallel, MemorySection(**memory))
    away = actor._activations
    found |= {"most": away.most if away else 0, "left": away.held if away else 0}
    found["peak"] = live.peak - found["most"]
    found["metrics"] = update(actor).sums
    found["gradients"] = [buffer.grad_data.numpy().tobytes() for buffer in gradient_buffers(actor)]
    return found | {"steps": train(actor), "weights": digest(actor)}


def _planned(actor: Any, parallel: dict[str, Any], memory: Any) -> dict[str, int]:
    """Bytes in CPU memory and on the device at the peak of an update."""
    setting = ActivationSetting(
        actor.weights.shape, actor.layout, ParallelSection(**parallel), memory, "float32", kernels="padded"
    )
    stage = actor.layout.coord(dist.get_rank())["pp"]
    return {
        "planned": offloaded_activations(setting, stage, TOKENS, MICROBATCHES),
        "stored": in_flight_activations(setting, stage, TOKENS, MICROBATCHES),
        "gradient": setting.itemsize * TOKENS * setting.shape.hidden_size,
    }
