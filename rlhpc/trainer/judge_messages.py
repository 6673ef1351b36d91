"""Messages between the ranks that train and judges. Judges answer in order all but ``BeginJudging``,
``TakeActorWeights`` and ``EndJudging``, and a ``SaveJudged`` when its files are written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from rlhpc.api import RunState, Sample
from rlhpc.core.context import Reason
from rlhpc.trainer.roles import PerSample


@dataclass(frozen=True)
class BeginJudging:
    """The attempt begins. ``checkpoint``: the one that is resumed; ``reference``: it has the reference model."""

    checkpoint: Path | None
    reference: bool


@dataclass(frozen=True)
class TakeActorWeights:
    """A model (``reference`` or ``critic``) begins RL with the actor's weights, which follow as ``ActorTensor``s, the
    last of them None."""

    model: str


@dataclass(frozen=True)
class ActorTensor:
    """A whole weight of the actor, by HuggingFace's name."""

    name: str
    tensor: torch.Tensor


@dataclass(frozen=True)
class ScoreConversations:
    """Conversations for the reward model."""

    conversations: Sequence[np.ndarray]


@dataclass(frozen=True)
class ConversationScores:
    """The reward model's score of each."""

    scores: Sequence[float]


@dataclass(frozen=True)
class EvaluateSamples:
    """Samples of a step, for reference and critic. ``step``: the RL step, from 1."""

    step: int
    samples: Sequence[Sample]


@dataclass(frozen=True)
class SampleValues:
    """Values of each token that ``token_values`` takes from judges."""

    values: Mapping[str, PerSample]


@dataclass(frozen=True)
class TrainCritic:
    """Updates of the critic. ``samples``: None for those of the last ``EvaluateSamples``."""

    state: RunState
    old_values: PerSample
    returns: PerSample
    samples: Sequence[Sample] | None = None


@dataclass(frozen=True)
class CriticTrained:
    """Metrics of the updates, and what they changed in the state."""

    metrics: Mapping[str, float]
    steps: int | None  # RunState.critic_steps
    skipped: int  # RunState.critic_skipped
    grad_norms: Sequence[float] | None  # RunState.grad_norms of the critic


@dataclass(frozen=True)
class SaveJudged:
    """The models, each into its own folder of a checkpoint. ``reference``: the reference model too."""

    folder: Path
    state: RunState
    asynchronous: bool
    reference: bool


@dataclass(frozen=True)
class JudgedSaved:
    """A model's files are written, or cannot be. ``step``: RunState.total_steps."""

    step: int
    error: OSError | None


@dataclass(frozen=True)
class EndJudging:
    """The run ends. ``reason``: why it stops early."""

    reason: Reason | None


@dataclass(frozen=True)
class JudgeAnswer:
    """An answer, and the seconds that the judges' first rank was idle and at work since the last one."""

    content: ConversationScores | SampleValues | CriticTrained | JudgedSaved
    idle: float
    busy: float
