"""Generates the groups of one step: prompts are requested until the batch is full of groups to train on; surplus groups
are kept for the next step. Every rank makes the same decisions (``rlhpc.trainer.sampling_plan``)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

import torch
import torch.distributed as dist

from rlhpc.api import Prompt, RunState, Sample
from rlhpc.core import spans
from rlhpc.data.groups import Group, make_filter, training_samples
from rlhpc.parallel.transfer import gather_objects, one_to_all
from rlhpc.rollout.collect import Scored
from rlhpc.rollout.requests import Task, blank_draft, first_samples, sampling_of, share_of
from rlhpc.rollout.response_lengths import sampled_lengths
from rlhpc.trainer.choosing import Chooser, Counts, Sampled
from rlhpc.trainer.length_bias import count_dropped
from rlhpc.trainer.rollout import Rollout
from rlhpc.trainer.routed_experts import moved_routed_experts, without_routed_experts
from rlhpc.trainer.sampling_plan import Bounds, Outcome, StepPlan, check_shortage

Metrics = dict[str, float]


@dataclass
class Sampler:
    """Generates the groups of a run's steps with the engines of all ranks. Its methods are collective."""

    rollout: Rollout
    chooser: Chooser

    def sample(self, state: RunState) -> Sampled:
        """Generates with the engine's present weights; it must be awake."""
        chooser = self.chooser
        section, carryover = chooser.config.train, chooser.carryover
        dynamic = section.dynamic_sampling
        stale = carryover.forget_stale(state.policy_version, dynamic.max_staleness) if dynamic else []
        replayed = chooser.replayed(state)
        collection = _Collection(self, state, section.prompts_per_step - len(replayed))
        collection.counts.stale_groups = len(stale)
        outcome = collection.run()
        if dynamic:
            check_shortage(dynamic, outcome, section.prompts_per_step)
            count_dropped(state, [*stale, *(collection.groups[number] for number in outcome.dropped)])
        new = [collection.groups[number] for number in outcome.taken]
        carryover.ready = [collection.groups[number] for number in outcome.kept]
        carryover.unfinished = [collection.groups[number] for number in outcome.unfinished]
        carryover.lengths.record(sampled_lengths(collection.ended))
        groups = [*replayed, *new] if new else []
        samples = training_samples(groups, mask_truncated=section.mask_truncated)
        greedy = self._greedy(state, groups, collection.counts)
        return Sampled(groups, len(replayed), [*samples], greedy, outcome, collection.counts, collection.metrics)

    def _greedy(self, state: RunState, groups: Sequence[Group], counts: Counts) -> list[Sample | None]:
        """Adds failures of rewards to ``counts``."""
        chooser, rollout = self.chooser, self.rollout
        if not chooser.needs_greedy or not groups:
            return []
        prompts = [chooser.prompt_at(group.number) for group in groups]
        found: list[Sample | None] = []
        for scored in rollout.answers(state, prompts, 1, sampling_of(rollout.section, 0.0)):
            found.append(None if scored.dropped else scored.sample)
            counts.reward_failures.update(scored.failures)
        return found


class _Collection:
    """A step's groups while they are generated."""

    def __init__(self, sampler: Sampler, state: RunState, count: int) -> None:
        chooser = sampler.chooser
        config, carryover = chooser.config, chooser.carryover
        section = config.train.dynamic_sampling
        self._prompt_at, self._prompts = chooser.prompt_at, chooser.prompts
        self._rollout, self._config, self._state = sampler.rollout, config, state
        self._section = section
        self._keeps = make_filter(section) if section else bool
        self.groups = {group.number: group for group in carryover.groups}
        bounds = Bounds(
            count,
            least=min(count, ceil(chooser.least_samples / config.rollout.samples_per_prompt)),
            oversample=section.oversample if section else 1.0,
            max_batches=section.max_batches if section else 1,
            max_staleness=section.max_staleness if section else 0,
            later=chooser.least_new,
        )
        self._plan = StepPlan(
            bounds,
            state.prompt_cursor,
            {group.number for group in carryover.ready},
            {group.number for group in carryover.unfinished},
            {number: state.policy_version - group.policy_version for number, group in self.groups.items()},
        )
        lengths = carryover.lengths
        self._dealer = self._rollout.dealer(
            state,
            sampling_of(config.rollout, config.rollout.temperature),
            lambda group: lengths.ratios.get(self.groups[group].prompt_id, 1.0),
            lengths.mean,
        )
        self._collector = self._dealer.collector
        self._seen: Counter[int] = Counter()  # prompts requested in this step
        self._ended = 0  # groups of this rank's engine that have been harvested
        self.ended: list[Group] = []  # groups of which every response ended in this step
        self.counts = Counts()

    def run(self) -> Outcome:
        """Batch after batch of prompts, until there are enough groups or the limit is reached."""
        while (batch := self._plan.next_batch()) is not None:
            self._request(batch)
            self._generate()
        return self._plan.finish()

    @property
    def metrics(self) -> Metrics:
        """Metrics of the distribution of responses over engines; none if distribution cannot matter."""
        if self._config.rollout.dealing == "equal":
            return {}
        dealer = self._dealer
        return {
            "rollout/waiting_responses_max": dealer.waiting,
            "rollout/moved_responses": dealer.moved,
            "rollout/turns_ended": dealer.put_back,
        }

    def _request(self, batch: Sequence[int]) -> None:
        """Starts the groups of a batch, each on one engine."""
        config, state, place = self._config, self._state, self._rollout.place
        new = [number for number in batch if number not in self.groups]
        with spans.part("data"):
            prompts, state.prompt_cursor = self._prompts.take(state.prompt_cursor, len(new), config.seed)
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
        tasks = []
        for number in (batch[index] for index in place.own(len(batch))):
            prompt = known[number] if number in known else self._prompt_at(number)
            tasks += _tasks(self.groups[number], prompt, config.seed)
        self._dealer.begin(tasks, self._most(batch))

    def _most(self, batch: Sequence[int]) -> int:
        """Responses of the engine that has the most of a batch's."""
        engines = self._rollout.place.engines
        open_ = [self.groups[number].scored.count(False) for number in batch]
        return max(sum(open_[place] for place in share_of(len(batch), engines, engine)) for engine in range(engines))

    def _generate(self) -> None:
        """Until all requested responses have ended or, with oversampling, until enough groups are good and none has
        to be waited for."""
        steps = self._section.check_every if self._section and self._section.oversample > 1 else None
        in_flight = True
        while in_flight and (self._plan.missing or self._plan.waits):
            self._dealer.advance(steps)
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
        self.ended += ended
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
