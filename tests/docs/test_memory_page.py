"""docs/planning.md and docs/measurements/2026-11-layers.md have the bytes that are predicted and counted."""

from __future__ import annotations

import re

import pytest

from bench.shapes import model_fields
from rlhpc.config import yaml12
from rlhpc.config.training import MemorySection, ParallelSection
from rlhpc.models import read_model, shape_of
from rlhpc.plan.estimates.activations import ActivationSetting, Kernels, layer_activations
from rlhpc.sharding.layout import ParallelLayout
from tests.docs.pages import DOCS, ROOT

TOKENS = 2048


def predicted(memory: MemorySection, kernels: Kernels) -> float:
    """Bytes of a token in a layer of Qwen2.5-1.5B."""
    shape = read_model(ROOT / "configs" / "ready" / "models" / "Qwen2.5-1.5B-Instruct")
    setting = ActivationSetting(shape, ParallelLayout(1), ParallelSection(), memory, "bfloat16", kernels)
    return layer_activations(setting, TOKENS, has_experts=False) / TOKENS


def test_bytes_of_activations_are_those_predicted() -> None:
    rows = re.findall(r"^\| (`(?:none|selective|full)`.*?) \| [^|]+ \| ([\d,]+) \| ([\d,]+) \|", _page(), re.MULTILINE)
    assert len(rows) == 6
    for keys, on_cpu, on_gpu in rows:
        recompute, *others = re.findall("`(.*?)`", keys)
        changes = {
            key.removeprefix("actor.memory."): value for text in others for key, value in yaml12.parse(text, "").items()
        }
        memory = MemorySection(recompute=recompute, **changes)
        assert predicted(memory, "padded") == int(on_cpu.replace(",", "")), keys
        assert predicted(memory, "fused") == int(on_gpu.replace(",", "")), keys


def _page() -> str:
    return (DOCS / "planning.md").read_text()


LAYER_TOKENS = 4096


@pytest.mark.parametrize("name", ["8B", "30B-A3B"])
def test_bytes_kept_of_a_token_are_those_planned(name: str) -> None:
    page = (DOCS / "measurements" / "2026-11-layers.md").read_text().partition("\nWith them")[2]
    (counted,) = re.findall(rf"^\| {name} \| next \|.* \| ([\d,]+) \(\d+%\) \| \d+ \|$", page, re.MULTILINE)
    shape = shape_of(model_fields(name.lower(), 1, "bfloat16"), where=name)
    memory = MemorySection(recompute="none")
    setting = ActivationSetting(shape, ParallelLayout(1), ParallelSection(), memory, "bfloat16")
    planned = layer_activations(setting, LAYER_TOKENS, has_experts=shape.experts is not None) / LAYER_TOKENS
    assert planned == int(counted.replace(",", ""))
