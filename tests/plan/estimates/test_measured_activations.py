"""Measured activations of architectures that no family describes: they are what real modules store, or a bound covers
them; and the cache that keeps them."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from rlhpc.config.training import MemorySection, ParallelSection
from rlhpc.core import env
from rlhpc.models import describe_fields, read_config
from rlhpc.plan.estimates.fsdp_activations import (
    FsdpSetting,
    MeasuredActivations,
    find_measured,
    keep_measured,
    stored_activations,
)
from tests.helpers import fsdp_memory
from tests.helpers.commands import invoke
from tests.helpers.distributed import run_ranks
from tests.helpers.fsdp_memory import FULL, LENGTHS, SELECTIVE, SIZES, FsdpCase, folders_for
from tests.helpers.plain_model import write_other_inputs, write_other_model

FOUND = MeasuredActivations(1000.0, 100.0, 600.0, 8.0, 50.0, 50.0, 50.0, 4.0, mlp=400.0)
UNKNOWN = [FsdpCase("gemma2"), FsdpCase("mistral", dtype="float32")]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(env.XDG_CACHE_HOME, str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_measurement_is_found_by_config_and_dtype(tmp_path: Path) -> None:
    folder = write_other_model(tmp_path / "one")
    other = write_other_model(tmp_path / "other", num_hidden_layers=3)
    assert find_measured(folder, "bfloat16") is None
    keep_measured(folder, "bfloat16", FOUND)
    assert find_measured(folder, "bfloat16") == FOUND
    assert find_measured(folder, "float32") is None
    assert find_measured(other, "bfloat16") is None
    renamed = write_other_model(tmp_path / "renamed", _name_or_path="elsewhere", transformers_version="4.0")
    assert find_measured(renamed, "bfloat16") == FOUND


@pytest.mark.parametrize("fault", ["versions", "format", "measured", "text"])
def test_what_is_not_of_these_versions_is_not_used(tmp_path: Path, fault: str) -> None:
    folder = write_other_model(tmp_path / "one")
    file = keep_measured(folder, "bfloat16", FOUND)
    document = json.loads(file.read_text())
    assert document["versions"]["torch"] == version("torch")
    faults: dict[str, Any] = {"versions": {"torch": "1.0"}, "format": 0, "measured": {"layers": "many"}}
    file.write_text("{" if fault == "text" else json.dumps({**document, fault: faults.get(fault)}))
    assert find_measured(folder, "bfloat16") is None


def setting(**changes: Any) -> FsdpSetting:
    fields = {
        "architectures": ["OtherForCausalLM"],
        "model_type": "other",
        "num_hidden_layers": 2,
        "hidden_size": 10,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 100,
        "max_position_embeddings": 100,
        "intermediate_size": 20,
    }
    usual = FsdpSetting(describe_fields(fields, ""), 1, ParallelSection(), MemorySection(), "bfloat16", measured=FOUND)
    return replace(usual, **changes)


def test_recomputation_and_exchanges_change_what_was_measured() -> None:
    """By hand, for 10 tokens: 1,000 bytes each and 8 of each layer; the head stores 2 x 10 + 40."""
    found = stored_activations(setting(), 10)
    assert (found.layers, found.outside, found.recomputed) == (10 * 1000 + 2 * 8, 10 * (100 + 60), 0)
    full = stored_activations(setting(memory=MemorySection(recompute="full")), 10)
    assert (full.layers, full.recomputed) == (2 * 2 * 10 * 10, 10 * 600 + 8)
    parts = MemorySection(recompute="selective", recompute_modules=["mlp", "core_attn"])
    selective = stored_activations(setting(memory=parts), 10)
    assert (selective.layers, selective.recomputed) == (10 * (1000 - 400 - 4) + 16, 10 * 404 // 2)
    ulysses = stored_activations(setting(cp=4), 10)
    assert ulysses.layers == 10 * (1000 + 50 + 50) + 16, "two heads of keys for four ranks, and the kernel's output"
    gathered = stored_activations(setting(cp=3), 10)
    assert gathered.layers == 10 * (1000 + 2.5 * 50 + 50) + 16


@pytest.mark.heavy
@pytest.mark.long
def test_the_bound_covers_every_architecture() -> None:
    import torch

    from rlhpc.backends.fsdp.saved_activations import measure_activations
    from tests.helpers.tiny_architectures import ARCHITECTURES, config_of

    assert len(ARCHITECTURES) >= 15
    for name in ARCHITECTURES:
        config = config_of(name)
        fields = {**json.loads(config.to_json_string()), "architectures": ["OtherForCausalLM"]}
        for dtype in ("bfloat16", "float32"):
            measured = measure_activations(config, getattr(torch, dtype))
            bound = FsdpSetting(describe_fields(fields, name), 1, ParallelSection(), MemorySection(), dtype)
            sizes = [stored_activations(replace(bound, measured=each), 4096).total for each in (None, measured)]
            assert sizes[1] <= sizes[0] < 4 * sizes[1], (name, dtype)


@pytest.mark.ranks
@pytest.mark.parametrize("memories", [((),), pytest.param((FULL, SELECTIVE), marks=pytest.mark.long)], ids=str)
@pytest.mark.long
def test_measured_activations_are_those_of_real_passes(tmp_path: Path, memories: tuple[Any, ...]) -> None:
    folders = folders_for(tmp_path, UNKNOWN, SIZES)
    cases = [replace(case, memory=memory) for case in UNKNOWN for memory in memories]
    (real,) = run_ranks(_stored, 1, folders, cases)
    for case, measured in zip(cases, real, strict=True):
        assert _planned(folders[case.kind], case) == pytest.approx(measured, rel=0.15), case


def _stored(folders: dict[str, Path], cases: list[FsdpCase]) -> list[int]:
    return [fsdp_memory.stored_bytes(fsdp_memory._backend(folders[case.kind], case)) for case in cases]


def _planned(folder: Path, case: FsdpCase) -> int:
    import torch
    from transformers import AutoConfig

    from rlhpc.backends.fsdp.saved_activations import measure_activations

    measured = measure_activations(AutoConfig.from_pretrained(folder), getattr(torch, case.dtype))
    memory = MemorySection(**dict(case.memory))
    model = describe_fields(read_config(folder), str(folder))
    planned = FsdpSetting(model, 1, ParallelSection(), memory, case.dtype, "padded", measured)
    return stored_activations(planned, sum(LENGTHS)).total


@pytest.mark.workers
@pytest.mark.long
def test_a_plan_uses_what_the_command_measured(tmp_path: Path) -> None:
    config = str(write_other_inputs(tmp_path))
    before = invoke("plan", "run", config)
    assert "activations by a bound" in before.output, before.output
    found = invoke("plan", "measure", config)
    assert found.exit_code == 0, found.output
    assert "KiB per token and layer" in found.output
    after = invoke("plan", "run", config)
    assert "activations as measured by `rlhpc plan measure`" in after.output


@pytest.mark.workers
@pytest.mark.long
def test_what_cannot_be_measured_is_named(tmp_path: Path) -> None:
    config = write_other_inputs(tmp_path, model_type="unheard_of", architectures=["UnheardForCausalLM"])
    found = invoke("plan", "measure", str(config))
    assert found.exit_code != 0
    assert "rlhpc plan measure" in str(found.exception)
