"""A step's advantages, equal on every rank, and what they are made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rlhpc.algo import Responses
from rlhpc.algo.kl import kl_divergence
from rlhpc.api import Sample, TokenStats
from rlhpc.config.schema import AlgorithmSection
from rlhpc.trainer.batches import passing_batches
from rlhpc.trainer.build import Run
from rlhpc.trainer.roles import PerSample, Role, of_samples


@dataclass(frozen=True)
class StepAdvantages:
    """Of each sample's response tokens, and the mean divergence of a token where it was taken from the reward."""

    advantages: PerSample
    returns: PerSample | None  # what a critic is to learn
    divergence: float | None = None


def kl_in_reward(section: AlgorithmSection) -> bool:
    """Whether the reward has a KL penalty, so that advantages need log-probs."""
    return section.kl.placement == "reward" and section.kl.coefficient > 0


def needs_old_log_probs(run: Run) -> bool:
    """Whether the actor takes a pass of its own over the step's samples before the first update."""
    return run.config.train.minibatches * run.config.train.epochs > 1 or kl_in_reward(run.config.algorithm)


def token_values(run: Run, samples: Sequence[Sample]) -> dict[str, PerSample]:
    """What losses and advantages need of each token: log-probs of the engine, before the step's first update, and under
    the reference model; a critic's values.

    With a single update a step the second are those of that update itself, and need no pass of their own unless the
    reward takes them. Collective.
    """
    values: dict[str, PerSample] = {"engine_log_probs": [sample.log_probs for sample in samples]}
    if needs_old_log_probs(run):
        values["old_log_probs"] = _log_probs(run, run.models.actor, samples)
    if run.models.reference is not None:
        values["reference_log_probs"] = _log_probs(run, run.models.reference, samples)
        run.reference.offload()
    if run.models.critic is not None:
        critic = run.models.critic
        batches = passing_batches(run, critic, samples)
        values["old_values"] = of_samples(
            critic, samples, batches, lambda batches: [stats.values for stats in critic.model.values(batches)]
        )
        critic.model.offload()
    return values


def _log_probs(run: Run, role: Role, samples: Sequence[Sample]) -> PerSample:
    def evaluate(batches: Sequence) -> list[torch.Tensor]:
        stats: list[TokenStats] = role.model.log_probs(batches, run.config.rollout.temperature)
        return [s.log_probs for s in stats]

    return of_samples(role, samples, passing_batches(run, role, samples), evaluate)


def step_advantages(
    run: Run,
    section: AlgorithmSection,
    samples: Sequence[Sample],
    greedy: Sequence[Sample],
    values: dict[str, PerSample],
) -> StepAdvantages:
    """The algorithm's advantages of the whole step."""
    mask = _joined([np.ones(s.response_len) if s.response_mask is None else s.response_mask for s in samples])
    penalty = divergence = None
    if kl_in_reward(section):
        ours, reference = (_joined(values[name]) for name in ("old_log_probs", "reference_log_probs"))
        tokens = kl_divergence(ours, reference, section.kl.estimator)
        penalty, divergence = section.kl.coefficient * tokens, float((tokens * mask).sum() / mask.sum().clamp(min=1))
    responses = Responses.of(
        torch.tensor([sample.reward for sample in samples], dtype=torch.float64),
        torch.tensor([sample.group_id for sample in samples]),
        torch.tensor([sample.response_len for sample in samples]),
        mask=mask,
        penalty=penalty,
        baselines=_baselines(samples, greedy) if greedy else None,
        values=_joined(values["old_values"]) if "old_values" in values else None,
    )
    estimate = run.algorithm.advantage(responses, section)
    returns = None if estimate.returns is None else _parted(estimate.returns, samples)
    return StepAdvantages(_parted(estimate.advantages, samples), returns, divergence)


def _baselines(samples: Sequence[Sample], greedy: Sequence[Sample]) -> torch.Tensor:
    """For each sample the reward of the likeliest response to its prompt."""
    of_prompt = {sample.prompt_id: sample.reward for sample in greedy}
    return torch.tensor([of_prompt[sample.prompt_id] for sample in samples], dtype=torch.float64)


def _joined(values: Sequence[np.ndarray]) -> torch.Tensor:
    """All samples' tokens end to end, in float64."""
    return torch.from_numpy(np.concatenate(values).astype(np.float64))


def _parted(values: torch.Tensor, samples: Sequence[Sample]) -> PerSample:
    """Each sample's own tokens again, in float32."""
    ends = np.cumsum([sample.response_len for sample in samples])
    return np.split(values.float().numpy(), ends[:-1])
