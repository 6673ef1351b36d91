"""A step's advantages and their inputs, equal on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from rlhpc.algo import Algorithm, Responses
from rlhpc.algo.objective import kl_divergence
from rlhpc.api import PackedBatch, Sample
from rlhpc.config.algorithm import AlgorithmSection
from rlhpc.trainer.batches import Batching, forward_batches, kl_in_reward
from rlhpc.trainer.roles import JudgeModels, Models, PerSample, Role, of_samples


@dataclass(frozen=True)
class StepAdvantages:
    """For each sample's response tokens; the mean KL divergence of a token if the reward is penalised by it."""

    advantages: PerSample
    returns: PerSample | None  # the critic's targets
    divergence: float | None = None


def token_values(
    models: Models, batching: Batching, samples: Sequence[Sample], temperature: float
) -> dict[str, PerSample]:
    """Inputs of losses and advantages for each response token: log-probs of the engine, of the actor before the step's
    first update, and of the reference model, unless engines have computed them; values of the critic.

    Without ``batching.old_log_probs`` the loss of the step's only update uses its own log-probs as the old ones.
    Judges compute theirs meanwhile. Collective.
    """
    if models.judges is not None:
        models.judges.evaluate(samples)
    values: dict[str, PerSample] = {"engine_log_probs": [sample.log_probs for sample in samples]}
    if batching.old_log_probs:
        values["old_log_probs"] = log_probs(models.actor, batching, samples, temperature)
    values |= values_beside(models, batching, samples, temperature)
    if models.judges is not None:
        values |= models.judges.values()
    return values


def values_beside(
    models: Models | JudgeModels, batching: Batching, samples: Sequence[Sample], temperature: float
) -> dict[str, PerSample]:
    """Those of the reference model and of the critic, as far as these ranks have them. Collective."""
    values: dict[str, PerSample] = {}
    if models.reference is not None:
        values["reference_log_probs"] = log_probs(models.reference, batching, samples, temperature)
        models.reference.model.offload()
    elif samples[0].reference_log_probs is not None:
        values["reference_log_probs"] = [_given(sample) for sample in samples]
    if models.critic is not None:
        values["old_values"] = _values(models.critic, batching, samples)
        models.critic.model.offload()
    return values


def log_probs(role: Role, batching: Batching, samples: Sequence[Sample], temperature: float) -> PerSample:
    """A model's log-probs of each response token that is trained on, else 0. Collective, unless the role is alone."""

    def evaluate(batches: Sequence[PackedBatch]) -> list[torch.Tensor]:
        return [stats.log_probs for stats in role.model.log_probs(batches, temperature)]

    return of_samples(role, samples, forward_batches(role, batching, samples), evaluate)


def _given(sample: Sample) -> np.ndarray:
    """The reference's log-probs as an engine has computed them, 0 where a token is not trained on."""
    found = sample.reference_log_probs
    assert found is not None, f"a response to prompt {sample.prompt_id} has no log-probs of the reference"
    return found if sample.response_mask is None else np.where(sample.response_mask, found, np.float32(0))


def _values(role: Role, batching: Batching, samples: Sequence[Sample]) -> PerSample:
    def evaluate(batches: Sequence[PackedBatch]) -> list[torch.Tensor]:
        return [stats.values for stats in role.model.values(batches)]

    return of_samples(role, samples, forward_batches(role, batching, samples), evaluate)


def step_advantages(
    algorithm: Algorithm,
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
    )
    baselines = _baselines(samples, greedy) if greedy else None
    old_values = _joined(values["old_values"]) if "old_values" in values else None
    responses = replace(responses, baselines=baselines, values=old_values)
    estimate = algorithm.advantage(responses, section)
    returns = None if estimate.returns is None else _parted(estimate.returns, samples)
    return StepAdvantages(_parted(estimate.advantages, samples), returns, divergence)


def _baselines(samples: Sequence[Sample], greedy: Sequence[Sample]) -> torch.Tensor:
    """For each sample the reward of the greedy response to its prompt."""
    of_prompt = {sample.prompt_id: sample.reward for sample in greedy}
    return torch.tensor([of_prompt[sample.prompt_id] for sample in samples], dtype=torch.float64)


def _joined(values: Sequence[np.ndarray]) -> torch.Tensor:
    """All samples' tokens end to end, in float64."""
    return torch.from_numpy(np.concatenate(values).astype(np.float64))


def _parted(values: torch.Tensor, samples: Sequence[Sample]) -> PerSample:
    """Splits them by sample, in float32."""
    ends = np.cumsum([sample.response_len for sample in samples])
    return np.split(values.float().numpy(), ends[:-1])
