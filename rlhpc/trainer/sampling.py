"""The samples of one step: prompts are requested until the batch is full of groups to train on; surplus groups are kept
for the next step. Every rank makes the same decisions (``rlhpc.trainer.sampling_plan``)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import ceil

import numpy as np
import torch
import torch.distributed as dist

from rlhpc.api import Prompt, RunState, Sample
from rlhpc.config.rollout import replayed_groups
from rlhpc.config.schema import RunConfig
from rlhpc.core import spans
from rlhpc.data.group_filter import make_filter
from rlhpc.data.groups import Group, training_samples
from rlhpc.data.prompts import PromptSet
from rlhpc.data.shuffling import shuffled
from rlhpc.parallel.transfer import gather_objects, one_to_all
from rlhpc.rollout.collect import Scored
from rlhpc.rollout.requests import Task, blank_draft, first_samples, turns
from rlhpc.trainer.batches import shuffles
from rlhpc.trainer.carryover import Carryover
from rlhpc.trainer.length_bias import count_dropped, count_trained, length_bias
from rlhpc.trainer.reward_model import RewardModel
from rlhpc.trainer.rollout import Rollout
from rlhpc.trainer.routed_experts import moved_routed_experts, without_routed_experts
from rlhpc.trainer.sampling_plan import Bounds, Outcome, StepPlan, check_shortage

Metrics = dict[str, float]


@dataclass
class Counts:
    """What a step's rollout counts over all engines."""

    generated_groups: int = 0
    stale_groups: int = 0
    tool_calls: int = 0
    failed_tool_calls: int = 0
    reward_failures: Counter[str] = field(default_factory=Counter)  # by kind
    reward_lengths: list[int] = field(default_factory=list)  # tokens of each sequence that the reward model read


@dataclass
class Sampled:
    """What the engines generated for a step, equal on every rank: ``groups``, the first ``replayed`` of which are of
    former steps; their ``samples``, group after group; ``greedy``, the greedy responses to their prompts if the
    algorithm needs them. None in place of a sample that is dropped because a reward failed."""

    groups: list[Group]
    replayed: int
    samples: list[Sample | None]
    greedy: list[Sample | None]
    outcome: Outcome
    counts: Counts


@dataclass
class StepSamples:
    """The samples that a step trains on, and the greedy ones that are their baselines. No samples at all if there are
    too few."""

    samples: list[Sample]
    greedy: list[Sample]
    metrics: Metrics
    reward_lengths: Sequence[int] = ()  # see Counts


@dataclass
class Sampler:
    """Generates and chooses the samples of a run's steps. All methods are collective.

    ``least_samples``: the number below which a step has too few samples to train on.
    """

    config: RunConfig
    rollout: Rollout
    prompts: PromptSet
    carryover: Carryover
    reward_model: RewardModel | None
    least_samples: int
    needs_greedy: bool

    def sample(self, state: RunState) -> Sampled:
        """Generates with the engine's present weights; it must be awake."""
        section, carryover = self.config.train, self.carryover
        dynamic = section.dynamic_sampling
        stale = carryover.forget_stale(state.policy_version, dynamic.max_staleness) if dynamic else []
        replayed = self._replayed(state)
        collection = _Collection(self, state, section.prompts_per_step - len(replayed))
        collection.counts.stale_groups = len(stale)
        outcome = collection.run()
        if dynamic:
            check_shortage(dynamic, outcome, section.prompts_per_step)
            count_dropped(state, [*stale, *(collection.groups[number] for number in outcome.dropped)])
        new = [collection.groups[number] for number in outcome.taken]
        carryover.ready = [collection.groups[number] for number in outcome.kept]
        carryover.unfinished = [collection.groups[number] for number in outcome.unfinished]
        groups = [*replayed, *new] if new else []
        samples = training_samples(groups, mask_truncated=section.mask_truncated)
        greedy = self._greedy(state, groups, collection.counts)
        return Sampled(groups, len(replayed), [*samples], greedy, outcome, collection.counts)

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

    def _replayed(self, state: RunState) -> list[Group]:
        """Groups of former steps that this step trains on again."""
        buffer, section = self.carryover.replay, self.config.train.replay
        if buffer is None or section is None:
            return []
        buffer.forget_stale(state.policy_version)
        count = replayed_groups(self.config.train.prompts_per_step, section.fraction, len(buffer))
        return buffer.sample(count, self.config.seed, state.step)

    def _greedy(self, state: RunState, groups: Sequence[Group], counts: Counts) -> list[Sample | None]:
        """Adds failures of rewards to ``counts``."""
        if not self.needs_greedy or not groups:
            return []
        prompts, rollout = [self.prompt_at(group.number) for group in groups], self.rollout
        mine = rollout.answer(state, prompts, 1, temperature=0.0)
        found: list[Sample | None] = []
        for part in gather_objects(mine if rollout.place.leads else None):
            for scored in part or ():
                found.append(None if scored.dropped else scored.sample)
                counts.reward_failures.update(scored.failures)
        return found

    def _metrics(self, state: RunState, sampled: Sampled, used: Sequence[Group]) -> Metrics:
        train, counts, outcome = self.config.train, sampled.counts, sampled.outcome
        samples = [sample for group in used for sample in group.usable]
        found: Metrics = {f"reward/failures/{kind}": n for kind, n in sorted(counts.reward_failures.items())}
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
        if samples and (train.dynamic_sampling is not None or train.replay is not None):
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


class _Collection:
    """A step's groups while they are generated."""

    def __init__(self, sampler: Sampler, state: RunState, count: int) -> None:
        config, carryover = sampler.config, sampler.carryover
        section = config.train.dynamic_sampling
        self._sampler, self._rollout, self._config, self._state = sampler, sampler.rollout, config, state
        self._section = section
        self._keeps = make_filter(section) if section else bool
        self.groups = {group.number: group for group in carryover.groups}
        bounds = Bounds(
            count,
            least=min(count, ceil(sampler.least_samples / config.rollout.samples_per_prompt)),
            oversample=section.oversample if section else 1.0,
            max_batches=section.max_batches if section else 1,
            max_staleness=section.max_staleness if section else 0,
            later=sampler.least_new,
        )
        self._plan = StepPlan(
            bounds,
            state.prompt_cursor,
            {group.number for group in carryover.ready},
            {group.number for group in carryover.unfinished},
            {number: state.policy_version - group.policy_version for number, group in self.groups.items()},
        )
        self._collector = self._rollout.collector(state, config.rollout.temperature)
        self._seen: Counter[int] = Counter()  # prompts requested in this step
        self._ended = 0  # groups of this rank's engine that have been harvested
        self.counts = Counts()

    def run(self) -> Outcome:
        """Batch after batch of prompts, until there are enough groups or the limit is reached."""
        while (batch := self._plan.next_batch()) is not None:
            self._request(batch)
            self._generate()
        return self._plan.finish()

    def _request(self, batch: Sequence[int]) -> None:
        """Starts the groups of a batch, each on one engine."""
        config, state, place = self._config, self._state, self._rollout.place
        new = [number for number in batch if number not in self.groups]
        with spans.part("data"):
            prompts, state.prompt_cursor = self._sampler.prompts.take(state.prompt_cursor, len(new), config.seed)
        count = config.rollout.samples_per_prompt
        firsts = first_samples([prompt.prompt_id for prompt in prompts], count, self._seen)
        for number, prompt, first in zip(new, prompts, firsts, strict=True):
            drafts = (blank_draft(prompt, state.policy_version),) * count
            self.groups[number] = Group(number, state.step, first, drafts, (False,) * count, (False,) * count)
        self.counts.generated_groups += len(new)
        if len(new) < len(batch) and config.actor.moe.router_replay:
            moved = moved_routed_experts(place, [self.groups[number] for number in batch])
            self.groups.update(zip(batch, moved, strict=True))
        known = dict(zip(new, prompts, strict=True))
        for number in (batch[index] for index in place.own(len(batch))):
            prompt = known[number] if number in known else self._sampler.prompt_at(number)
            self._collector.begin(_tasks(self.groups[number], prompt, config.seed))

    def _generate(self) -> None:
        """Until all requested responses have ended or, with oversampling, until enough groups are good and none has
        to be waited for."""
        steps = self._section.check_every if self._section and self._section.oversample > 1 else None
        in_flight = True
        while in_flight and (self._plan.missing or self._plan.waits):
            self._collector.advance(steps)
            ended, left = self._totals() if steps else (0, 0)
            in_flight = left > 0
            if in_flight and ended < max(1, self._plan.missing):
                continue  # no need to wait for the reward workers yet
            self._ended = self._collector.ended_groups
            self._take(self._exchange(self._collector.harvest()))
        if in_flight:
            for scored in self._exchange(self._collector.stop()):
                self._put(scored, done=False)

    def _totals(self) -> tuple[int, int]:
        """Over all engines: groups that have ended and are not harvested, responses in flight. Collective."""
        mine = [self._collector.ended_groups - self._ended, self._collector.in_flight]
        totals = torch.tensor(mine if self._rollout.place.leads else [0, 0])
        dist.all_reduce(totals)
        return int(totals[0]), int(totals[1])

    def _exchange(self, mine: list[Scored]) -> list[Scored]:
        """Every engine's samples on every rank; routed experts stay where they are. Collective."""
        place, counts = self._rollout.place, self.counts
        found: list[Scored] = []
        for rank, part in enumerate(gather_objects(without_routed_experts(mine) if place.leads else None)):
            if part is not None:
                found += mine if rank == place.rank else part
        for scored in found:
            counts.tool_calls += scored.tool_calls
            counts.failed_tool_calls += scored.failed_tool_calls
            counts.reward_failures.update(scored.failures)
        return found

    def _take(self, found: Sequence[Scored]) -> None:
        for scored in found:
            self._put(scored, done=True)
        ended = [self.groups[number] for number in sorted({s.group for s in found}) if self.groups[number].finished]
        good = [group.number for group in ended if group.usable and self._keeps(group.usable)]
        if self._section is not None and self._section.filter is not None:
            good = one_to_all(good)  # a user's filter may not give the same result on every rank
        self._plan.settle(good, {group.number for group in ended} - set(good))

    def _put(self, scored: Scored, *, done: bool) -> None:
        group = self.groups[scored.group]
        self.groups[scored.group] = group.with_sample(scored.index, scored.sample, scored=done, dropped=scored.dropped)


def _tasks(group: Group, prompt: Prompt, seed: int) -> list[Task]:
    """The responses of a group that are not finished."""
    return [
        Task(group.number, index, prompt, draft, (seed, group.step, prompt.prompt_id, group.first_sample + index))
        for index, (draft, scored) in enumerate(zip(group.samples, group.scored, strict=True))
        if not scored
    ]
