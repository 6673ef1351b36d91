"""docs/measurements/2026-11-layers.md has what a layer keeps, counted from autograd: so much is planned."""

from __future__ import annotations

import re

import pytest

from bench.shapes import model_fields
from rlhpc.config.training import MemorySection, ParallelSection
from rlhpc.models import shape_of
from rlhpc.plan.estimates.activations import ActivationSetting, layer_activations
from rlhpc.sharding.layout import ParallelLayout
from tests.docs.pages import DOCS

TOKENS = 4096


@pytest.mark.parametrize("name", ["8B", "30B-A3B"])
def test_bytes_kept_of_a_token_are_those_planned(name: str) -> None:
    page = (DOCS / "measurements" / "2026-11-layers.md").read_text().partition("\nWith them")[2]
    (counted,) = re.findall(rf"^\| {name} \| next \|.* \| ([\d,]+) \(\d+%\) \| \d+ \|$", page, re.MULTILINE)
    shape = shape_of(model_fields(name.lower(), 1, "bfloat16"), where=name)
    memory = MemorySection(recompute="none")
    setting = ActivationSetting(shape, ParallelLayout(1), ParallelSection(), memory, "bfloat16")
    planned = layer_activations(setting, TOKENS, has_experts=shape.experts is not None) / TOKENS
    assert planned == int(counted.replace(",", ""))
