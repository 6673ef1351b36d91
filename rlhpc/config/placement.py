"""Sections about where each model is: on the ranks that train, in turn, or on ranks of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from rlhpc.config.section import NonNegativeInt, PositiveInt, Section

PlacementName = Literal["colocated", "separate", "lend"]
CostSeconds = Annotated[float, Field(ge=0, le=1e6)]


class CostsSection(Section):
    """Constants of the virtual time that the schedule follows, never measured in the run; see docs/asynchrony.md."""

    step_seconds: CostSeconds | None = None
    """Time of an engine's step without its sequences, in seconds; default: predicted at submission."""
    sequence_seconds: CostSeconds | None = None
    """Time that each sequence adds to an engine's step, in seconds; default: predicted at submission."""
    train_seconds: CostSeconds | None = None
    """Time from the last response of a step's batch to the next weights, in seconds; default: predicted at
    submission."""
    tool_seconds: CostSeconds = 1.0
    """Time from a tool call to its answer, in seconds."""
    lend_seconds: CostSeconds | None = None
    """Part of each step in which trainers' ranks generate, with placement lend, in seconds; default: predicted at
    submission."""


class JudgesSection(Section):
    """Ranks of their own for models beside the actor, between those that train and those that generate; see
    docs/asynchrony.md."""

    ranks: PositiveInt | None = None
    """Number of ranks of the models that are on judges; or set nodes."""
    nodes: PositiveInt | None = None
    """Number of nodes whose ranks are those of the models on judges; or set ranks."""


class AsynchronySection(Section):
    """Generation beside training, with placement separate or lend; see docs/asynchrony.md."""

    max_staleness: NonNegativeInt = 1
    """Maximum staleness of a token that is trained on, in steps: 0 generates and trains in turn."""
    schedule: Literal["deterministic", "arrival"] = "deterministic"
    """Order of generation: by virtual time, so that two runs are equal bit for bit (deterministic), or what is finished
    first (arrival)."""
    replay: Path | None = None
    """Folder of a run with schedule arrival, or that may lose engines, whose recorded order is followed, for equal
    weights bit for bit."""
    in_flight: Literal["recompute", "keep", "finish"] = "recompute"
    """Treatment of responses in flight when new weights arrive: recompute their KV cache, keep it, or finish them on
    the old weights first."""
    costs: CostsSection = CostsSection()
