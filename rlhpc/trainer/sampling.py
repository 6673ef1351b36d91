"""The samples of one step: prompts are asked for until its batch is full of groups that teach something, what is left
over is kept for the next one. Every rank comes to the same decisions (``rlhpc.plan.sampling``)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

import numpy as np
import torch
import torch.distributed as dist

from rlhpc.api import Prompt, RunState, Sample
from rlhpc.data.group_filter import make_filter
from rlhpc.data.groups import Group, training_samples
from rlhpc.plan.sampling import Bounds, Outcome, StepPlan, check_shortage, replayed_groups
from rlhpc.rollout.collect import Scored
from rlhpc.rollout.requests import Task, blank_draft, first_samples, share_of, turns
from rlhpc.trainer.batches import exchange_samples
from rlhpc.trainer.build import Run
from rlhpc.trainer.rollout import generate_samples, make_collector

Metrics = dict[str, float]


@dataclass(frozen=True)
class StepSamples:
    """Every engine's samples of a step, group after group; ``greedy`` are the likeliest responses to their prompts,
    where the algorithm asks for them. No samples at all where there was too little to learn from."""

    samples: list[Sample]
    greedy: list[Sample]
    metrics: Metrics


def step_samples(run: Run, state: RunState) -> StepSamples:
    """Generate a step's samples with the weights in the engine, which is awake. Collective."""
    section, kept, version = run.config.train, run.kept, state.weights_version
    dynamic = section.dynamic_sampling
    stale = kept.forget_stale(version, dynamic.max_staleness) if dynamic else 0
    replayed = _replayed(run, state)
    collection = _Collection(run, state, section.prompts_per_step - len(replayed))
    outcome = collection.run()
    if dynamic:
        check_shortage(dynamic, outcome, section.prompts_per_step)
    new = [collection.groups[number] for number in outcome.taken]
    kept.ready = [collection.groups[number] for number in outcome.kept]
    kept.unfinished = [collection.groups[number] for number in outcome.unfinished]
    groups = [*replayed, *new] if new else []
    samples = training_samples(groups, section.mask_truncated)
    if len(samples) < _least_samples(run):  # some were left out
        kept.ready = [*new, *kept.ready]
        groups, samples = [], []
    elif not any(sample.chosen_len for sample in samples):
        groups, samples = [], []
    elif kept.replay is not None:
        kept.replay.add(new)
    metrics = collection.metrics(outcome, groups)
    if dynamic:
        metrics["sampling/stale_groups"] = stale
    if section.replay:
        metrics["replay/used_groups"] = len(replayed)
        metrics["replay/kept_groups"] = len(kept.replay)
    return StepSamples(samples, _greedy(run, state, groups), metrics)


def _replayed(run: Run, state: RunState) -> list[Group]:
    """Groups of former steps that this one learns from again."""
    buffer, section = run.kept.replay, run.config.train.replay
    if buffer is None:
        return []
    buffer.forget_stale(state.weights_version)
    count = replayed_groups(run.config.train.prompts_per_step, section.fraction, len(buffer))
    return buffer.draw(count, run.config.seed, state.step)


def _greedy(run: Run, state: RunState, groups: Sequence[Group]) -> list[Sample]:
    if not run.algorithm.needs_greedy or not groups:
        return []
    prompts = [prompt_of(run, group.number) for group in groups]
    return exchange_samples(run, generate_samples(run, state, prompts, 1, temperature=0.0))


def prompt_of(run: Run, number: int) -> Prompt:
    """The prompt in a place of the run's order."""
    return run.prompts.take(number, 1, run.config.seed)[0][0]


class _Collection:
    """A step's groups while they come together."""

    def __init__(self, run: Run, state: RunState, count: int) -> None:
        section = run.config.train.dynamic_sampling
        self._run, self._state, self._section = run, state, section
        self._keeps = make_filter(section) if section else bool
        self.groups = {group.number: group for group in (*run.kept.ready, *run.kept.unfinished)}
        bounds = Bounds(
            count,
            least=min(count, ceil(_least_samples(run) / run.config.rollout.samples_per_prompt)),
            oversample=section.oversample if section else 1.0,
            max_batches=section.max_batches if section else 1,
        )
        self._plan = StepPlan(
            bounds,
            state.prompt_cursor,
            {group.number for group in run.kept.ready},
            {group.number for group in run.kept.unfinished},
        )
        self._collector = make_collector(run, state, run.config.rollout.temperature)
        self._seen: Counter[int] = Counter()  # prompts asked for in this step
        self._ended = 0  # groups of this rank's engine that have been harvested
        self._generated = 0
        self._calls = self._failures = 0
        self._reward_failures: Counter[str] = Counter()
        if run.tools is not None:  # what a validation has left
            run.tools.take_counts()
        if run.judge is not None:
            run.judge.failures()

    def run(self) -> Outcome:
        """Batch after batch of prompts, until there is enough or the bound is reached."""
        while (batch := self._plan.next_batch()) is not None:
            self._ask(batch)
            self._generate()
        return self._plan.finish()

    def metrics(self, outcome: Outcome, groups: Sequence[Group]) -> Metrics:
        samples = [sample for group in groups for sample in group.usable]
        found: Metrics = {f"reward/failures/{kind}": count for kind, count in sorted(self._reward_failures.items())}
        if self._section is not None:
            found |= {
                "sampling/batches": outcome.batches,
                "sampling/generated_groups": self._generated,
                "sampling/dropped_groups": len(outcome.dropped),
                "sampling/kept_groups": len(self._run.kept.ready),
                "sampling/carried_groups": len(outcome.unfinished),
                "sampling/missing_groups": outcome.short,
            }
        if samples and (self._section is not None or self._run.config.train.replay is not None):
            ages = [self._state.weights_version - sample.weights_version for sample in samples]
            found |= {"sampling/staleness_mean": float(np.mean(ages)), "sampling/staleness_max": float(max(ages))}
        if self._run.config.rollout.tools:
            found |= {"tools/calls": self._calls, "tools/failures": self._failures}
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
            drafts = (blank_draft(prompt, self._state.weights_version),) * count
            self.groups[number] = Group(number, self._state.step, first, drafts, (False,) * count, (False,) * count)
        self._generated += len(new)
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
                continue  # the judge need not be waited for yet
            self._ended = self._collector.ended_groups
            self._judge(self._exchange(self._collector.harvest()))
        if under_way:
            for scored in self._exchange(self._collector.stop()):
                self._put(scored, done=False)

    def _totals(self) -> tuple[int, int]:
        """Over all engines: groups that have ended and were not harvested, responses under way. Collective."""
        mine = [self._collector.ended_groups - self._ended, self._collector.under_way]
        totals = torch.tensor(mine if self._run.leads_engine else [0, 0])
        dist.all_reduce(totals)
        return int(totals[0]), int(totals[1])

    def _exchange(self, mine: list[Scored]) -> list[Scored]:
        """What every engine has, on every rank. Collective."""
        run, leads = self._run, self._run.leads_engine
        counts = run.tools.take_counts() if run.tools is not None and leads else (0, 0)
        failures = run.judge.failures() if run.judge is not None else {}
        parts: list[tuple[list[Scored], tuple[int, int], dict[str, int]]] = [([], (0, 0), {})] * run.layout.world_size
        dist.all_gather_object(parts, (mine if leads else [], counts, failures))
        for _, (calls, failed), failed_rewards in parts:
            self._calls += calls
            self._failures += failed
            self._reward_failures.update(failed_rewards)
        return [scored for part, _, _ in parts for scored in part]

    def _judge(self, found: Sequence[Scored]) -> None:
        for scored in found:
            self._put(scored, done=True)
        ended = [self.groups[number] for number in sorted({s.group for s in found}) if self.groups[number].finished]
        good = [group.number for group in ended if group.usable and self._keeps(group.usable)]
        self._plan.judge(good, {group.number for group in ended} - set(good))

    def _put(self, scored: Scored, done: bool) -> None:
        group = self.groups[scored.group]
        self.groups[scored.group] = group.with_sample(scored.index, scored.sample, done, scored.dropped)


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
