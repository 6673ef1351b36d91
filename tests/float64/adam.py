"""Learning rate and AdamW, written out."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.float64.drive import Tables


def learning_rate(section: Any, done: int, total: int) -> float:
    """Of a model that has done some of its steps: linear warm-up, then from the peak to final_fraction of it, which the
    step after the last one would have."""
    if done < section.warmup_steps:
        return section.learning_rate * (done + 1) / section.warmup_steps
    share = min(1.0, (done - section.warmup_steps) / max(1, total - section.warmup_steps))
    left = {"constant": 1.0, "linear": 1 - share, "cosine": (1 + math.cos(math.pi * share)) / 2}[section.schedule]
    final = 1.0 if section.schedule == "constant" else section.final_fraction
    return section.learning_rate * (final + (1 - final) * left)


def norm_of(gradient: Tables) -> float:
    """The gradient's norm, before it is bounded by max_grad_norm."""
    return math.sqrt(sum(float((g**2).sum()) for g in gradient.values()))


def is_spike(norm: float, former: list[float], ratio: float | None) -> bool:
    """Whether an update is skipped: its norm is above ``ratio`` times the median of the last 64 that are not 0, of at
    least 10."""
    known = sorted([each for each in former if each > 0][-64:])
    if ratio is None or len(known) < 10:
        return False
    middle = len(known) // 2
    median = known[middle] if len(known) % 2 else (known[middle - 1] + known[middle]) / 2
    return norm > ratio * median


@dataclass
class Adam:
    """AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101, algorithm 2) on tables, by their names."""

    section: Any
    first: Tables = field(default_factory=dict)
    second: Tables = field(default_factory=dict)
    count: int = 0

    def step(self, tables: Tables, gradient: Tables, rate: float) -> None:
        """Updates the tables in place."""
        section, norm = self.section, norm_of(gradient)
        scale = min(1.0, section.max_grad_norm / (norm + 1e-6))
        self.count += 1
        for name, table in tables.items():
            g = gradient[name] * scale
            self.first[name] = section.beta1 * self.first.get(name, 0.0) + (1 - section.beta1) * g
            self.second[name] = section.beta2 * self.second.get(name, 0.0) + (1 - section.beta2) * g**2
            mean = self.first[name] / (1 - section.beta1**self.count)
            square = self.second[name] / (1 - section.beta2**self.count)
            table *= 1 - rate * section.weight_decay
            table -= rate * mean / (np.sqrt(square) + section.epsilon)
