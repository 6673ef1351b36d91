"""Data that a step trained on, for observers of the run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlhpc.api import Sample
from rlhpc.trainer.advantages import StepAdvantages
from rlhpc.trainer.roles import PerSample


@dataclass(frozen=True)
class StepData:
    """Samples of a step with their values per token, and what was computed for them; equal on every rank."""

    samples: Sequence[Sample]
    values: dict[str, PerSample]  # as rlhpc.trainer.advantages.token_values returns them
    estimate: StepAdvantages
    generated: Sequence[Sample] = ()  # those that the step's own weights sampled, and greedy ones
    reward_lengths: Sequence[int] = ()  # tokens of each sequence that the reward model read
