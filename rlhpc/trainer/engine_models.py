"""The reference and the reward model beside an engine, which score its groups before they are delivered."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from rlhpc.data.groups import Group
from rlhpc.data.prompts import PromptSet
from rlhpc.observe.metrics import finish_device_work
from rlhpc.rollout.collect import Scored
from rlhpc.rollout.generator.messages import FinishedGroup
from rlhpc.trainer.advantages import log_probs
from rlhpc.trainer.batches import Batching
from rlhpc.trainer.reward_model import RewardModel, counted_as_zero
from rlhpc.trainer.roles import Role


@dataclass
class EngineModels:
    """Implements ``rlhpc.rollout.generator.parts.FrozenModels``. The roles are alone.

    The samples of a group are packed without those of others, so that what is found does not depend on which groups
    finish at the same time.
    """

    reference: Role | None
    reward: RewardModel | None
    batching: Batching
    temperature: float
    prompts: PromptSet
    validation: PromptSet | None = None

    def score(self, groups: Sequence[FinishedGroup]) -> list[FinishedGroup]:
        """See ``FrozenModels``. Groups that are not trained on stay as they are."""
        finish_device_work()  # an engine step may be in flight, with collectives of vLLM's own
        if self.reward is not None:
            groups = [self._rewarded(self.reward, one) if one.keeps else one for one in groups]
            self.reward.offload()
        if self.reference is not None:
            groups = [self._referred(self.reference, one) if one.keeps else one for one in groups]
            self.reference.model.offload()
        return list(groups)

    def score_held_out(self, found: Sequence[Scored]) -> list[Scored]:
        """See ``FrozenModels``; a response that training would drop counts as 0."""
        if self.reward is None or not found:
            return list(found)
        finish_device_work()
        scored: list[Scored] = []
        for _, several in groupby(found, key=lambda one: one.group):
            answers = list(several)
            samples, _ = self.reward.score([one.sample for one in answers], self.validation, stays=True)
            for one, sample in zip(answers, samples, strict=True):
                scored.append(replace(one, sample=counted_as_zero(one.sample) if sample is None else sample))
        self.reward.offload()
        return scored

    def _rewarded(self, model: RewardModel, one: FinishedGroup) -> FinishedGroup:
        """With the reward model's part of the rewards of its samples and the greedy one."""
        places = _places(one.group)
        greedy = [one.greedy] if one.greedy is not None else []
        samples = [*(one.group.samples[place] for place in places), *greedy]
        found, failures = model.score(samples, self.prompts, stays=True)
        group = one.group
        for place, sample in zip(places, found, strict=False):
            known = group.samples[place]
            group = group.with_sample(place, sample or known, scored=True, dropped=sample is None)
        counts = replace(one.counts, reward_failures=dict(Counter(one.counts.reward_failures) + failures))
        return replace(one, group=group, greedy=found[-1] if greedy else None, counts=counts)

    def _referred(self, reference: Role, one: FinishedGroup) -> FinishedGroup:
        """With the reference's log-probs of its samples."""
        places = _places(one.group)
        if not places:  # the reward model has dropped all of them
            return one
        samples = [one.group.samples[place] for place in places]
        group = one.group
        for place, sample, values in zip(
            places, samples, log_probs(reference, self.batching, samples, self.temperature), strict=True
        ):
            group = group.with_sample(place, replace(sample, reference_log_probs=values), scored=True)
        return replace(one, group=group)


def _places(group: Group) -> list[int]:
    """Places of its usable samples."""
    return [place for place, dropped in enumerate(group.dropped) if group.scored[place] and not dropped]
