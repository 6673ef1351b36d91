"""Learning rate by the steps of a model."""

from __future__ import annotations

import math

from rlhpc.config.training import OptimizerSection


def learning_rate(section: OptimizerSection, step: int, total_steps: int) -> float:
    """Rate of the updates in ``step`` (from 0) of those that train the model: linear warm-up, then the schedule, which
    would reach its final fraction in the step after the last one."""
    if step < section.warmup_steps:
        return section.learning_rate * (step + 1) / section.warmup_steps
    if section.schedule == "constant":
        return section.learning_rate
    span = max(1, total_steps - section.warmup_steps)
    progress = min(1.0, (step - section.warmup_steps) / span)
    shape = 1 - progress if section.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return section.learning_rate * (section.final_fraction + (1 - section.final_fraction) * shape)
