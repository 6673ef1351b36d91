"""A step's advantages: equal on every rank, then each rank's share on its packed batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from rlhpc.algo import Responses
from rlhpc.algo.kl import kl_divergence
from rlhpc.api import Sample
from rlhpc.config.schema import AlgorithmSection
from rlhpc.data.collate import scatter, unpack
from rlhpc.trainer.batches import Minibatch
from rlhpc.trainer.build import Run


@dataclass(frozen=True)
class StepAdvantages:
    """Of each sample's response tokens, and the mean divergence of a token where it was taken from the reward."""

    of_samples: list[np.ndarray]
    divergence: float | None = None


def kl_in_reward(section: AlgorithmSection) -> bool:
    """Whether the reward has a KL penalty, so that advantages need log-probs."""
    return section.kl.placement == "reward" and section.kl.coefficient > 0


def step_advantages(
    run: Run,
    section: AlgorithmSection,
    samples: Sequence[Sample],
    greedy: Sequence[Sample],
    minibatches: Sequence[Minibatch],
) -> StepAdvantages:
    """The algorithm's advantages of the whole step. Collective where log-probs enter the reward."""
    penalty = divergence = None
    if kl_in_reward(section):
        ours, reference = (
            _of_all_samples(run, samples, minibatches, name) for name in ("old_log_probs", "reference_log_probs")
        )
        tokens = kl_divergence(ours, reference, section.kl.estimator)
        penalty, divergence = section.kl.coefficient * tokens, float(tokens.mean())
    responses = Responses.of(
        torch.tensor([sample.reward for sample in samples], dtype=torch.float64),
        torch.tensor([sample.group_id for sample in samples]),
        torch.tensor([sample.response_len for sample in samples]),
        penalty=penalty,
        baselines=_baselines(samples, greedy) if greedy else None,
    )
    advantages = run.algorithm.advantage(responses, section).advantages.float().numpy()
    ends = np.cumsum([sample.response_len for sample in samples])
    return StepAdvantages(np.split(advantages, ends[:-1]), divergence)


def attach_advantages(
    minibatches: Sequence[Minibatch], samples: Sequence[Sample], advantages: Sequence[np.ndarray]
) -> list[Minibatch]:
    """This rank's batches with the advantages of their tokens."""
    return [
        Minibatch(
            tuple(
                batch.with_extra(
                    "advantages",
                    scatter(
                        batch,
                        [advantages[i] for i in batch.sample_ids],
                        [samples[i].prompt_len for i in batch.sample_ids],
                    ),
                )
                for batch in minibatch.batches
            ),
            minibatch.denominator,
        )
        for minibatch in minibatches
    ]


def _baselines(samples: Sequence[Sample], greedy: Sequence[Sample]) -> torch.Tensor:
    """For each sample the reward of the likeliest response to its prompt."""
    of_group = {sample.group_id: sample.reward for sample in greedy}
    return torch.tensor([of_group[sample.group_id] for sample in samples], dtype=torch.float64)


def _of_all_samples(run: Run, samples: Sequence[Sample], minibatches: Sequence[Minibatch], name: str) -> torch.Tensor:
    """A per-token value of this rank's batches, for all ranks' samples end to end, in float64. Collective."""
    coord = run.layout.coord(run.info.rank)
    mine: dict[int, np.ndarray] = {}
    if all(place == 0 for axis, place in coord.items() if axis in ("tp", "pp", "cp")):
        for batch in (batch for minibatch in minibatches for batch in minibatch.batches):
            prompts = [samples[i].prompt_len for i in batch.sample_ids]
            mine.update(zip(batch.sample_ids, unpack(batch, batch.extra[name], prompts), strict=True))
    parts: list[dict[int, np.ndarray]] = [{} for _ in range(run.layout.world_size)]
    dist.all_gather_object(parts, mine)
    values = {i: value for part in parts for i, value in part.items()}
    return torch.from_numpy(np.concatenate([values[i] for i in range(len(samples))]).astype(np.float64))
