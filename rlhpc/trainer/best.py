"""The step with the best validation so far, whose checkpoint is kept (checkpoint.keep_best)."""

from __future__ import annotations

import math
from collections.abc import Mapping

from rlhpc.api import RunState
from rlhpc.checkpoint.store import CheckpointStore
from rlhpc.config.schema import CheckpointSection
from rlhpc.core.errors import UserError


def note_validation(section: CheckpointSection, state: RunState, metrics: Mapping[str, float]) -> bool:
    """True if a validation after this step has the best value so far, which ``state`` then has. Equal on all ranks."""
    value = best_value(section, metrics)
    if value is None or math.isnan(value):
        return False
    better = value > state.best_value if section.greater_is_better else value < state.best_value
    if state.best_step >= 0 and not better:
        return False
    state.best_of, state.best_step, state.best_value = _best_of(section), state.total_steps, value
    return True


def best_value(section: CheckpointSection, metrics: Mapping[str, float]) -> float | None:
    """Value that validations are compared by; None without checkpoint.keep_best or validation. Raises a UserError if
    validation has no such metric."""
    name = section.best_metric
    if name is None or not metrics:
        return None
    if name not in metrics:
        raise UserError(
            f"validation has no metric {section.keep_best!r}",
            where="checkpoint.keep_best",
            remedy="choose one of " + ", ".join(found.removeprefix("validation/") for found in sorted(metrics)),
        )
    return metrics[name]


def forget_lost_best(section: CheckpointSection, state: RunState, store: CheckpointStore) -> None:
    """Forgets the best step of another metric, or without a complete checkpoint."""
    if state.best_step >= 0 and (state.best_of != _best_of(section) or not store.has(state.best_step)):
        state.best_of, state.best_step, state.best_value = "", -1, 0.0


def _best_of(section: CheckpointSection) -> str:
    """Metric and direction; empty without checkpoint.keep_best."""
    if section.best_metric is None:
        return ""
    return f"{'max' if section.greater_is_better else 'min'} {section.best_metric}"
