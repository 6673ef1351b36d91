"""Text and JSON of ``rlhpc plan measure``, and what a plan says of activations and gradients with FSDP2."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rlhpc.cli.tables import labelled
from rlhpc.config.schema import RunConfig
from rlhpc.models import ModelDescription, ModelShape
from rlhpc.plan.estimates.accumulation import chosen_accumulation
from rlhpc.plan.estimates.measured_activations import find_measured
from rlhpc.plan.measure import Measurement
from rlhpc.sharding.layout import ParallelLayout
from rlhpc.sharding.placement import backend_for


def measure_lines(found: Sequence[Measurement]) -> list[str]:
    """What was measured of each model."""
    return labelled([(one.key, _text(one)) for one in found])


def _text(one: Measurement) -> str:
    if one.measured is None:
        return "a known family, whose activations are counted without a measurement"
    each = one.measured.layers / one.layers / 1024
    outside = one.measured.outside / 1024
    return f"{each:,.1f} KiB per token and layer, {outside:,.1f} outside of {one.layers} layers; kept in {one.file}"


def measure_json(found: Sequence[Measurement]) -> list[dict[str, Any]]:
    """The same in bytes."""
    return [
        {
            "key": one.key,
            "folder": str(one.folder),
            "file": None if one.file is None else str(one.file),
            "bytes_per_token": None if one.measured is None else asdict(one.measured),
        }
        for one in found
    ]


def mesh_rows(config: RunConfig, model: ModelDescription, layout: ParallelLayout) -> list[tuple[str, str]]:
    """What the planner assumes with FSDP2: how gradients are summed, and where activations are from."""
    if backend_for(config, model) != "fsdp":
        return []
    planned = chosen_accumulation(config, model, layout)
    by = "actor.memory.accumulation" if config.actor.memory.accumulation != "auto" else "chosen by the GPU's memory"
    texts = {
        "keep": f"summed over ranks after the last microbatch, whole on each rank until then ({by}: keep)",
        "reduce": f"summed over ranks after each microbatch ({by}: reduce)",
    }
    rows = [("gradients", texts[planned])]
    if isinstance(model, ModelShape):
        return rows
    if find_measured(config.model.path, config.model.dtype) is not None:
        return [*rows, ("memory", "activations as measured by `rlhpc plan measure`")]
    return [*rows, ("memory", "activations by a bound for any architecture; `rlhpc plan measure` measures this one's")]
