"""The samples of one step: prompts are asked for until its batch is full of groups that teach something, what is left
over is kept for the next one. Every rank makes the same decisions (``rlhpc.trainer.sampling_plan``)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil

import numpy as np
import torch
import torch.distributed as dist

from rlhpc.api import Prompt, RunState, Sample
from rlhpc.data.group_filter import make_filter
from rlhpc.data.groups import Group, training_samples
from rlhpc.parallel.transfer import gather_objects, one_to_all
from rlhpc.rollout.collect import Scored
from rlhpc.rollout.requests import Task, blank_draft, first_samples, share_of, turns
from rlhpc.trainer.build import Run
from rlhpc.trainer.reward_model import score_by_model
from rlhpc.trainer.rollout import generate_samples, make_collector
from rlhpc.trainer.routed_experts import moved_routed_experts, without_routed_experts
from rlhpc.trainer.sampling_plan import Bounds, Outcome, StepPlan, check_shortage, replayed_groups

Metrics = dict[str, float]


@dataclass(frozen=True)
class Drawn:
    """What the engines have brought for a step, equal on every rank: ``groups``, of which the first ``replayed`` are of
    former steps; their ``samples``, group after group; ``greedy``, the likeliest responses to their prompts where the
    algorithm asks for them. None among samples stands for one that is left out because a reward failed."""

    groups: list[Group]
    replayed: int
    samples: list[Sample | None]
    greedy: list[Sample | None]
    outcome: Outcome
    collection: _Collection
    stale: int


@dataclass(frozen=True)
class StepSamples:
    """What a step learns from, and the baselines of its prompts. No samples at all where there is too little."""

    samples: list[Sample]
    greedy: list[Sample]
    metrics: Metrics


def draw_samples(run: Run, state: RunState) -> Drawn:
    """Generate with the weights in the engine, which is awake. Collective."""
    section, carryover = run.config.train, run.carryover
    dynamic = section.dynamic_sampling
    stale = carryover.forget_stale(state.policy_version, dynamic.max_staleness) if dynamic else 0
    replayed = _replayed(run, state)
    collection = _Collection(run, state, section.prompts_per_step - len(replayed))
    outcome = collection.run()
    if dynamic:
        check_shortage(dynamic, outcome, section.prompts_per_step)
    new = [collection.groups[number] for number in outcome.taken]
    carryover.ready = [collection.groups[number] for number in outcome.kept]
    carryover.unfinished = [collection.groups[number] for number in outcome.unfinished]
    groups = [*replayed, *new] if new else []
    samples = training_samples(groups, mask_truncated=section.mask_truncated)
    greedy = _greedy(run, state, groups, collection.failures)
    return Drawn(groups, len(replayed), [*samples], greedy, outcome, collection, stale)


def scored_by_model(run: Run, drawn: Drawn) -> Drawn:
    """With the reward model's part of all rewards. Collective."""

    def scored(found: list[Sample | None]) -> list[Sample | None]:
        results, failures = score_by_model(run, [sample for sample in found if sample is not None], run.prompts)
        drawn.collection.failures.update(failures)
        known = iter(results)
        return [None if sample is None else next(known) for sample in found]

    samples, greedy = scored(drawn.samples), scored(drawn.greedy)
    return replace(drawn, samples=samples, greedy=greedy)


def step_samples(run: Run, drawn: Drawn) -> StepSamples:
    """All of it that has a reward and, where the algorithm asks for one, a baseline; too little is left to the next
    step. The same on every rank."""
    carryover, greedy = run.carryover, [sample for sample in drawn.greedy if sample is not None]
    known = {sample.prompt_id for sample in greedy}
    good = [s is not None and (not run.algorithm.needs_greedy or s.prompt_id in known) for s in drawn.samples]
    samples = [sample for sample, is_good in zip(drawn.samples, good, strict=True) if sample is not None and is_good]
    places = [place for place, group in enumerate(drawn.groups) for _ in group.usable]
    lacking = {place for place, is_good in zip(places, good, strict=True) if not is_good}
    new = list(enumerate(drawn.groups))[drawn.replayed :]
    if len(samples) < _least_samples(run):  # some were left out
        carryover.put_back([group for place, group in new if place not in lacking])
        samples = []
    elif not any(sample.chosen_len for sample in samples):
        samples = []
    learnt = {sample.group_id for sample in samples}
    if carryover.replay is not None:
        carryover.replay.add(group for place, group in new if place in learnt)
    metrics = drawn.collection.metrics(drawn.outcome, [drawn.groups[place] for place in sorted(learnt)])
    if run.config.train.dynamic_sampling:
        metrics["sampling/stale_groups"] = drawn.stale
    if carryover.replay is not None:
        metrics["replay/used_groups"] = drawn.replayed
        metrics["replay/kept_groups"] = len(carryover.replay)
    return StepSamples(samples, greedy, metrics)


def _replayed(run: Run, state: RunState) -> list[Group]:
    """Groups of former steps that this one learns from again."""
    buffer, section = run.carryover.replay, run.config.train.replay
    if buffer is None:
        return []
    buffer.forget_stale(state.policy_version)
    count = replayed_groups(run.config.train.prompts_per_step, section.fraction, len(buffer))
    return buffer.sample(count, run.config.seed, state.step)


def _greedy(run: Run, state: RunState, groups: Sequence[Group], failures: Counter[str]) -> list[Sample | None]:
    """``failures`` of rewards are added to."""
    if not run.algorithm.needs_greedy or not groups:
        return []
    prompts = [prompt_of(run, group.number) for group in groups]
    mine = generate_samples(run, state, prompts, 1, temperature=0.0)
    found: list[Sample | None] = []
    for part in gather_objects(mine if run.leads_engine else None):
        for scored in part or ():
            found.append(None if scored.dropped else scored.sample)
            failures.update(scored.failures)
    return found


def prompt_of(run: Run, number: int) -> Prompt:
    """The prompt in a place of the run's order."""
    return run.prompts.take(number, 1, run.config.seed)[0][0]


class _Collection:
    """A step's groups while they come together."""

    def __init__(self, run: Run, state: RunState, count: int) -> None:
        section = run.config.train.dynamic_sampling
        self._run, self._state, self._section = run, state, section
        self._keeps = make_filter(section) if section else bool
        self.groups = {group.number: group for group in (*run.carryover.ready, *run.carryover.unfinished)}
        bounds = Bounds(
            count,
            least=min(count, ceil(_least_samples(run) / run.config.rollout.samples_per_prompt)),
            oversample=section.oversample if section else 1.0,
            max_batches=section.max_batches if section else 1,
        )
        self._plan = StepPlan(
            bounds,
            state.prompt_cursor,
            {group.number for group in run.carryover.ready},
            {group.number for group in run.carryover.unfinished},
        )
        self._collector = make_collector(run, state, run.config.rollout.temperature)
        self._seen: Counter[int] = Counter()  # prompts asked for in this step
        self._ended = 0  # groups of this rank's engine that have been harvested
        self._generated = 0
        self._calls = self._failed_calls = 0  # of tools
        self.failures: Counter[str] = Counter()  # of rewards, by kind

    def run(self) -> Outcome:
        """Batch after batch of prompts, until there is enough or the bound is reached."""
        while (batch := self._plan.next_batch()) is not None:
            self._ask(batch)
            self._generate()
        return self._plan.finish()

    def metrics(self, outcome: Outcome, groups: Sequence[Group]) -> Metrics:
        samples = [sample for group in groups for sample in group.usable]
        found: Metrics = {f"reward/failures/{kind}": count for kind, count in sorted(self.failures.items())}
        if self._section is not None:
            found |= {
                "sampling/batches": outcome.batches,
                "sampling/generated_groups": self._generated,
                "sampling/dropped_groups": len(outcome.dropped),
                "sampling/kept_groups": len(self._run.carryover.ready),
                "sampling/carried_groups": len(outcome.unfinished),
                "sampling/missing_groups": outcome.short,
            }
        if samples and (self._section is not None or self._run.config.train.replay is not None):
            ages = [self._state.policy_version - sample.policy_version for sample in samples]
            found |= {"sampling/staleness_mean": float(np.mean(ages)), "sampling/staleness_max": float(max(ages))}
        if self._run.config.rollout.tools:
            found |= {"tools/calls": self._calls, "tools/failures": self._failed_calls}
            if samples:
                found["tools/turns_mean"] = float(np.mean([turns(sample) for sample in samples]))
        return found

    def _ask(self, batch: Sequence[int]) -> None:
        """Put the groups of a batch under way, each on one engine."""
        new = [number for number in batch if number not in self.groups]
        prompts, self._state.prompt_cursor = self._run.prompts.take(
            self._state.prompt_cursor, len(new), self._run.config.seed
        )
        count = self._run.config.rollout.samples_per_prompt
        firsts = first_samples([prompt.prompt_id for prompt in prompts], count, self._seen)
        for number, prompt, first in zip(new, prompts, firsts, strict=True):
            drafts = (blank_draft(prompt, self._state.policy_version),) * count
            self.groups[number] = Group(number, self._state.step, first, drafts, (False,) * count, (False,) * count)
        self._generated += len(new)
        if len(new) < len(batch):
            under_way = moved_routed_experts(self._run, [self.groups[number] for number in batch])
            self.groups.update(zip(batch, under_way, strict=True))
        known = dict(zip(new, prompts, strict=True))
        mine = share_of(len(batch), self._run.num_engines, self._run.engine_index)
        for number in (batch[place] for place in mine):
            prompt = known[number] if number in known else prompt_of(self._run, number)
            self._collector.begin(_tasks(self.groups[number], prompt, self._run.config.seed))

    def _generate(self) -> None:
        """To the end of all that is under way; where more was asked for than is missing, until enough is good."""
        steps = self._section.check_every if self._section and self._section.oversample > 1 else None
        under_way = True
        while under_way and self._plan.missing:
            self._collector.advance(steps)
            ended, left = self._totals() if steps else (0, 0)
            under_way = left > 0
            if under_way and ended < self._plan.missing:
                continue  # the reward workers need not be waited for yet
            self._ended = self._collector.ended_groups
            self._take(self._exchange(self._collector.harvest()))
        if under_way:
            for scored in self._exchange(self._collector.stop()):
                self._put(scored, done=False)

    def _totals(self) -> tuple[int, int]:
        """Over all engines: groups that have ended and were not harvested, responses under way. Collective."""
        mine = [self._collector.ended_groups - self._ended, self._collector.in_flight]
        totals = torch.tensor(mine if self._run.leads_engine else [0, 0])
        dist.all_reduce(totals)
        return int(totals[0]), int(totals[1])

    def _exchange(self, mine: list[Scored]) -> list[Scored]:
        """What every engine has, on every rank; routed experts where they are. Collective."""
        run = self._run
        found: list[Scored] = []
        for rank, part in enumerate(gather_objects(without_routed_experts(mine) if run.leads_engine else None)):
            if part is not None:
                found += mine if rank == run.info.rank else part
        for scored in found:
            self._calls += scored.tool_calls
            self._failed_calls += scored.failed_tool_calls
            self.failures.update(scored.failures)
        return found

    def _take(self, found: Sequence[Scored]) -> None:
        for scored in found:
            self._put(scored, done=True)
        ended = [self.groups[number] for number in sorted({s.group for s in found}) if self.groups[number].finished]
        good = [group.number for group in ended if group.usable and self._keeps(group.usable)]
        if self._section is not None and self._section.filter is not None:
            good = one_to_all(good)  # a rule of one's own may not say the same on every rank
        self._plan.settle(good, {group.number for group in ended} - set(good))

    def _put(self, scored: Scored, done: bool) -> None:
        group = self.groups[scored.group]
        self.groups[scored.group] = group.with_sample(scored.index, scored.sample, scored=done, dropped=scored.dropped)


def _tasks(group: Group, prompt: Prompt, seed: int) -> list[Task]:
    """What is left to draw of a group."""
    return [
        Task(group.number, index, prompt, draft, (seed, group.step, prompt.prompt_id, group.first_sample + index))
        for index, (draft, scored) in enumerate(zip(group.samples, group.scored, strict=True))
        if not scored
    ]


def _least_samples(run: Run) -> int:
    """Fewer cannot feed every data-parallel rank in every minibatch."""
    layouts = (run.layout, run.critic.layout if run.critic else run.layout)
    return run.config.train.minibatches * max(layout.dp for layout in layouts)
