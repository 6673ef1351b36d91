"""Inputs of recomputed layers of transformers' modules that wait in CPU memory, as planned, without a changed bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.backends.fsdp.backend_cases import Case, make_backend
from tests.helpers.distributed import run_ranks
from tests.helpers.parts import sharded_model_of
from tests.helpers.tiny_models import make_model
from tests.helpers.training import digest, negative_log_likelihood, optimizer_section, packed_batch, train

pytestmark = [pytest.mark.ranks, pytest.mark.long]

LAYERS, TOKENS, MICROBATCHES = 6, 256, 2
CASES = {
    "shards": Case("qwen3"),
    "experts": Case("qwen3moe", memory={"accumulation": "keep", "reshard_after_forward": False}),
    "context": Case("llama", cp=2, memory={"cpu_offload": True}),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[dict[str, Any]]]]:
    """By rank and case: without and with offload, on two ranks."""
    folder = tmp_path_factory.mktemp("offload")
    kinds = {case.kind for case in CASES.values()}
    models = {kind: make_model(folder / kind, kind, num_hidden_layers=LAYERS) for kind in kinds}
    return run_ranks(_look, 2, models)


@pytest.mark.parametrize("case", CASES)
def test_every_bit_of_losses_gradients_and_weights_is_the_same(found: Any, case: str) -> None:
    """With microbatches of unequal length."""
    for rank in found:
        kept, offloaded = rank[case]
        for what in ("gradients", "steps", "weights"):
            assert offloaded[what] == kept[what], what


@pytest.mark.parametrize("case", CASES)
def test_cpu_memory_has_the_bytes_that_are_planned_and_the_device_as_many_less(found: Any, case: str) -> None:
    """Of all tensors at the peak of an update but those in CPU memory. Two layers' inputs are on the device too, and a
    gradient of their size where the peak moves to another layer."""
    for rank in found:
        kept, offloaded = rank[case]
        layer = offloaded["planned"] // LAYERS
        assert (kept["planned"], offloaded["most"]) == (0, offloaded["planned"])
        assert offloaded["left"] == 0, "after an update"
        assert kept["stored"] - offloaded["stored"] == (LAYERS - 2) * layer
        assert kept["peak"] - offloaded["peak"] >= (LAYERS - 3) * layer


def _look(models: dict[str, Path]) -> dict[str, list[dict[str, Any]]]:
    return {name: [_one(models[case.kind], case, offload=o) for o in (False, True)] for name, case in CASES.items()}


def _one(model: Path, case: Case, *, offload: bool) -> dict[str, Any]:
    from tests.helpers.live_memory import LiveStorages

    memory = {**case.memory, "recompute": "full", "offload_activations": offload}
    actor = make_backend(model, Case("", cp=case.cp, memory=memory), optimizer_section())
    with LiveStorages() as live:
        actor._differentiate([packed_batch([100, TOKENS - 100])] * MICROBATCHES, negative_log_likelihood, 100.0, 1.0)
    away = sharded_model_of(actor).activations
    found = {**_planned(actor, case.cp, memory), "most": away.most if away else 0, "left": away.held if away else 0}
    found["peak"] = live.peak - found["most"]
    found["gradients"] = [
        param.grad.to_local().numpy().tobytes() for param in sharded_model_of(actor).module.parameters()
    ]
    actor.optimizer.zero_grad()
    return found | {"steps": train(actor, 2), "weights": digest(actor)}


def _planned(actor: Any, cp: int, memory: dict[str, Any]) -> dict[str, int]:
    """Bytes of layers' inputs in CPU memory, and of activations on the device."""
    from rlhpc.config.training import MemorySection, ParallelSection
    from rlhpc.plan.estimates.fsdp_activations import FsdpSetting, stored_activations

    section = MemorySection(**memory)
    stored = stored_activations(FsdpSetting(actor.shape, cp, ParallelSection(cp=cp), section, "float32"), TOKENS // cp)
    return {"planned": stored.away, "stored": stored.total}
