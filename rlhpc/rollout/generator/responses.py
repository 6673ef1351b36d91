"""Responses of one engine: requests to it, and what it has generated. All ranks of the engine make the same calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rlhpc.api import Prompt
from rlhpc.core.heartbeat import touch
from rlhpc.data.groups import Group
from rlhpc.rollout.collect import Collector, Draft, Scored, Stepped
from rlhpc.rollout.generator.messages import Published
from rlhpc.rollout.generator.numbering import Numbering
from rlhpc.rollout.generator.ordered import OrderedCollector
from rlhpc.rollout.generator.parts import GeneratorParts
from rlhpc.rollout.generator.shelf import HeldGroup
from rlhpc.rollout.generator.state import EngineState
from rlhpc.rollout.requests import Task, blank_draft, first_samples, sampling_of, share_of
from rlhpc.rollout.schedule.engine_order import EngineOrder


@dataclass
class EngineResponses:
    """Groups and held-out prompts as requests to an engine, and their drafts.

    Held-out prompts have groups below 0, so that all responses of the engine have places of their own.
    """

    parts: GeneratorParts
    numbering: Numbering
    published: Published  # the version of the engine's weights
    order: EngineOrder | None = None  # of responses; None: as they come

    def __post_init__(self) -> None:
        parts, section = self.parts, self.parts.config.rollout
        sampling = sampling_of(section, section.temperature)
        arguments = parts.engine, sampling, parts.reward_workers, self.policy_version, parts.tools
        self._ordered = None
        if self.order is not None:
            self._ordered = OrderedCollector(*arguments, slots=section.sequences, order=self.order)
            self._ordered.expect(self.published)
        self.collector: Collector = self._ordered or Collector(*arguments)

    @property
    def version(self) -> int:
        """RL steps behind the engine's weights."""
        return self.published.version

    @property
    def policy_version(self) -> int:
        """Number of these steps that changed the weights."""
        return self.published.policy_version

    def begin(self, number: int) -> HeldGroup:
        """Requests a group."""
        config, prompt = self.parts.config, self._prompt(number)
        blank = blank_draft(prompt, self.policy_version)

        def drafts(count: int) -> Group:
            step, first = self.numbering.step(number, self.version), self.numbering.first_sample(number)
            return Group(number, step, first, (blank,) * count, (False,) * count, (False,) * count)

        count = config.rollout.samples_per_prompt
        held = HeldGroup(drafts(count), drafts(1) if self.parts.needs_greedy else None)
        self.collector.begin(held.tasks(prompt, config.seed, sampling_of(config.rollout, 0.0)))
        return held

    def restore(self, state: EngineState) -> None:
        """Requests what was in flight when the state was written, in its order."""
        held = {group.group.number: group for group in state.groups}
        drafts = []
        for response in state.in_flight:
            group = held[response.group]
            prompt, config = self._prompt(response.group), self.parts.config
            tasks = group.tasks(prompt, config.seed, sampling_of(config.rollout, 0.0))
            task = next(task for task in tasks if task.index == response.index)
            task = replace(task, tool_calls=response.tool_calls, failed_tool_calls=response.failed_tool_calls)
            drafts.append(Draft(task, calls=response.calls))
        self.collector.restore(drafts)
        if self._ordered is not None:
            self._ordered.note([part for one in state.groups for part in (one.group, one.greedy) if part is not None])

    def deal(self) -> Stepped:
        """Before a step: has those responses run that are next by what is expected of them. Returns what ended with the
        step in flight on the device, if there was one."""
        return self._ordered.deal() if self._ordered is not None else Stepped()

    def switch(self, published: Published, *, preempts: bool) -> Stepped:
        """Later tokens are of another version. ``preempts``: requests compute their KV cache again."""
        stepped = self.collector.switch(published.policy_version)
        if preempts:
            self.parts.engine.preempt()
        self.published = published
        if self._ordered is not None:
            self._ordered.expect(published)
        return stepped

    def validate(self, engines: Sequence[int] | None = None) -> list[Scored]:
        """Answers this engine's share of the held-out prompts alone; returns them with the responses that were
        being scored. The order in which the engine has its requests does not change. ``engines``: those that share the
        prompts; default: all."""
        touch("validation", self.version)
        self.collector.set_aside()
        self.collector.begin(self._held_out_tasks(engines))
        self.collector.advance()
        found = self.collector.harvest()
        self.collector.take_up()
        return found

    def _held_out_tasks(self, engines: Sequence[int] | None) -> list[Task]:
        """Tasks with the seeds that they have if all ranks generate."""
        config, validation = self.parts.config, self.parts.validation
        sharing = list(range(self.parts.place.engines)) if engines is None else [*engines]
        assert validation is not None, "there are no held-out prompts"
        section = config.validation
        prompts = [prompt for _, prompt in validation.first(section.max_prompts)]
        firsts = first_samples([prompt.prompt_id for prompt in prompts], section.samples_per_prompt)
        sampling = sampling_of(config.rollout, section.temperature, section.sampling)
        return [
            Task(
                -1 - number,
                index,
                prompts[number],
                blank_draft(prompts[number], self.policy_version, number),
                (config.seed, self.version, prompts[number].prompt_id, firsts[number] + index),
                sampling=sampling,
            )
            for number in share_of(len(prompts), len(sharing), sharing.index(self.parts.place.engine))
            for index in range(section.samples_per_prompt)
        ]

    def _prompt(self, number: int) -> Prompt:
        return self.parts.prompts.take(number, 1, self.parts.config.seed)[0][0]


def split_held_out(found: Sequence[Scored]) -> tuple[list[Scored], list[Scored]]:
    """Responses of groups; and those to held-out prompts, by their places, without routed experts: they are not trained
    on."""
    held_out = [
        replace(scored, group=-1 - scored.group, sample=replace(scored.sample, routed_experts=None))
        for scored in found
        if scored.group < 0
    ]
    ordered = sorted(held_out, key=lambda scored: (scored.group, scored.index))
    return [scored for scored in found if scored.group >= 0], ordered


def drafted(held: Mapping[int, HeldGroup], drafts: Sequence[Draft]) -> list[HeldGroup]:
    """The groups with the drafts of their responses in flight, in the order of their numbers."""
    found = dict(held)
    for draft in drafts:
        task = draft.task
        found[task.group] = found[task.group].with_response(task.index, task.draft, scored=False)
    return [found[number] for number in sorted(found)]
