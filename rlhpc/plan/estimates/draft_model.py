"""The second model of engines that guess tokens by one: its shape, and its memory on a rank."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from rlhpc.config.rollout import RolloutSection
from rlhpc.models import ModelShape, read_model
from rlhpc.plan.estimates.engine_elements import engine_numel
from rlhpc.plan.estimates.optimizer_memory import ITEMSIZE
from rlhpc.sharding.engine_shards import EngineLayout


def draft_shape(section: RolloutSection) -> ModelShape | None:
    """Returns the shape of ``rollout.speculative.model``, None without one. Raises UserError for a model of no known
    family."""
    guesses = section.speculative
    return None if guesses is None or guesses.model is None else _shape(guesses.model)


def draft_weights(section: RolloutSection, dtype: str) -> int:
    """Returns the bytes of its weights on a rank of an engine, 0 without one. vLLM loads it in the policy's type."""
    shape = draft_shape(section)
    return 0 if shape is None else ITEMSIZE[dtype] * engine_numel(shape, EngineLayout(section.tp))


@lru_cache(maxsize=8)  # a search needs it per layout
def _shape(folder: Path) -> ModelShape:
    return read_model(folder)
