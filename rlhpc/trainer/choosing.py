"""Choice of a step's samples: those with a reward and a baseline, beside groups of former steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from rlhpc.api import Prompt, RunState, Sample
from rlhpc.config.rollout import replayed_groups
from rlhpc.config.schema import RunConfig
from rlhpc.data.groups import Group
from rlhpc.data.packing import shuffled
from rlhpc.data.prompts import PromptSet
from rlhpc.rollout.requests import turns
from rlhpc.trainer.batches import shuffles
from rlhpc.trainer.carryover import Carryover
from rlhpc.trainer.length_bias import count_dropped, count_trained, length_bias
from rlhpc.trainer.reward_model import RewardModel
from rlhpc.trainer.sampling_plan import Outcome

Metrics = dict[str, float]


@dataclass
class Counts:
    """Counts of a step's rollout over all engines."""

    generated_groups: int = 0
    stale_groups: int = 0
    tool_calls: int = 0
    failed_tool_calls: int = 0
    reward_failures: Counter[str] = field(default_factory=Counter)  # by kind
    reward_lengths: list[int] = field(default_factory=list)  # tokens of each sequence that the reward model read


@dataclass
class Sampled:
    """Samples that the engines generated for a step, equal on every rank: ``groups``, the first ``replayed`` of which
    are of former steps; their ``samples``, group after group; ``greedy``, the greedy responses to their prompts if the
    algorithm needs them. None in place of a sample that is dropped because a reward failed."""

    groups: list[Group]
    replayed: int
    samples: list[Sample | None]
    greedy: list[Sample | None]
    outcome: Outcome
    counts: Counts
    metrics: Metrics = field(default_factory=dict)  # of their generation


@dataclass
class StepSamples:
    """The samples that a step trains on, and the greedy ones that are their baselines. No samples at all if there are
    too few."""

    samples: list[Sample]
    greedy: list[Sample]
    metrics: Metrics
    reward_lengths: Sequence[int] = ()  # see Counts


@dataclass
class Chooser:
    """Chooses the samples of a run's steps. ``scored_by_model`` is collective, the others are equal on every rank.

    ``least_samples``: the number below which a step has too few samples to train on.
    """

    config: RunConfig
    prompts: PromptSet
    carryover: Carryover
    reward_model: RewardModel | None
    least_samples: int
    needs_greedy: bool
    leaves: bool = True  # groups of a step with too few samples to the next step; else they are left out

    def scored_by_model(self, sampled: Sampled) -> Sampled:
        """The same with the reward model's part of all rewards."""
        model = self.reward_model
        assert model is not None

        def scored(found: list[Sample | None]) -> list[Sample | None]:
            results, failures = model.score([sample for sample in found if sample is not None], self.prompts)
            sampled.counts.reward_failures.update(failures)
            sampled.counts.reward_lengths += model.lengths
            known = iter(results)
            return [None if sample is None else next(known) for sample in found]

        samples, greedy = scored(sampled.samples), scored(sampled.greedy)
        return replace(sampled, samples=samples, greedy=greedy)

    def choose(self, state: RunState, sampled: Sampled) -> StepSamples:
        """The samples that have a reward and, if the algorithm needs one, a baseline; too few are left to the next
        step."""
        carryover, greedy = self.carryover, [sample for sample in sampled.greedy if sample is not None]
        known = {sample.prompt_id for sample in greedy}
        good = [s is not None and (not self.needs_greedy or s.prompt_id in known) for s in sampled.samples]
        samples = [s for s, is_good in zip(sampled.samples, good, strict=True) if s is not None and is_good]
        places = [place for place, group in enumerate(sampled.groups) for _ in group.usable]
        lacking = {place for place, is_good in zip(places, good, strict=True) if not is_good}
        new = list(enumerate(sampled.groups))[sampled.replayed :]
        if len(samples) < self.least_samples:
            if self.leaves:
                carryover.put_back([group for place, group in new if place not in lacking])
            samples = []
        elif not any(sample.trained_len for sample in samples):
            samples = []
        used = {sample.group_id for sample in samples}
        if carryover.replay is not None:
            carryover.replay.add(group for place, group in new if place in used)
        if self.config.train.dynamic_sampling is not None:
            left = {group.number for group in carryover.ready}
            count_trained(state, [group for place, group in new if place in used])
            count_dropped(state, [g for place, g in new if place not in used and g.number not in left])
        metrics = self._metrics(state, sampled, [sampled.groups[place] for place in sorted(used)])
        if sampled.replayed and shuffles(self.config.train):  # else replayed groups fill the first minibatches
            order = shuffled([sample.group_id for sample in samples], self.config.seed, state.step, epoch=0)
            samples = [samples[place] for place in order]
        return StepSamples(samples, greedy, metrics, sampled.counts.reward_lengths)

    @property
    def least_new(self) -> int:
        """Number of new groups in a step that replays as many as it may."""
        train = self.config.train
        replay, groups = train.replay, train.prompts_per_step
        return groups - (replayed_groups(groups, replay.fraction, replay.capacity) if replay is not None else 0)

    def prompt_at(self, number: int) -> Prompt:
        """The prompt in a place of the run's order."""
        return self.prompts.take(number, 1, self.config.seed)[0][0]

    def replayed(self, state: RunState) -> list[Group]:
        """Groups of former steps that this step trains on again."""
        buffer, section = self.carryover.replay, self.config.train.replay
        if buffer is None or section is None:
            return []
        buffer.forget_stale(state.policy_version)
        count = replayed_groups(self.config.train.prompts_per_step, section.fraction, len(buffer))
        return buffer.sample(count, self.config.seed, state.step)

    def _metrics(self, state: RunState, sampled: Sampled, used: Sequence[Group]) -> Metrics:
        train, counts, outcome = self.config.train, sampled.counts, sampled.outcome
        samples = [sample for group in used for sample in group.usable]
        found: Metrics = {f"reward/failures/{kind}": n for kind, n in sorted(counts.reward_failures.items())}
        found |= sampled.metrics
        if train.dynamic_sampling is not None:
            found |= {
                "sampling/batches": outcome.batches,
                "sampling/generated_groups": counts.generated_groups,
                "sampling/dropped_groups": len(outcome.dropped),
                "sampling/kept_groups": len(self.carryover.ready),
                "sampling/carried_groups": len(outcome.unfinished),
                "sampling/missing_groups": outcome.short,
                "sampling/stale_groups": counts.stale_groups,
            }
            bias = length_bias(state, self.carryover.groups)
            found |= {"sampling/length_bias": bias} if bias is not None else {}
        stale = train.dynamic_sampling is not None or train.replay is not None or self.config.placement != "colocated"
        if samples and stale:
            ages = [state.policy_version - sample.policy_version for sample in samples]
            found |= {"sampling/staleness_mean": float(np.mean(ages)), "sampling/staleness_max": float(max(ages))}
        if self.config.rollout.tools:
            found |= {"tools/calls": counts.tool_calls, "tools/failures": counts.failed_tool_calls}
            if samples:
                found["tools/turns_mean"] = float(np.mean([turns(sample) for sample in samples]))
                found["tools/answer_tokens_mean"] = float(np.mean([sample.tool_tokens for sample in samples]))
        if self.carryover.replay is not None:
            found["replay/used_groups"] = sampled.replayed
            found["replay/kept_groups"] = len(self.carryover.replay)
        return found
