"""Groups of one engine, from their first request until the trainers have consumed them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from rlhpc.api import Prompt, Sample
from rlhpc.data.groups import Filter, Group
from rlhpc.rollout.collect import Place, Scored
from rlhpc.rollout.generator.messages import FinishedGroup, GroupCounts
from rlhpc.rollout.requests import Sampling, Task

GREEDY = -1  # index of the greedy response to a group's prompt, a baseline
_INDEX_BITS = 20


@dataclass(frozen=True)
class HeldGroup:
    """A group with drafts for responses that are not scored, what it counts so far, and whether it is kept: None until
    all of it is scored. ``greedy``: the greedy response as a group of one, None if the algorithm needs none."""

    group: Group
    greedy: Group | None = None
    tool_calls: int = 0
    failed_tool_calls: int = 0
    reward_failures: Mapping[str, int] = field(default_factory=dict)
    keeps: bool | None = None

    @property
    def scored(self) -> bool:
        """True if all responses are scored."""
        return self.group.finished and (self.greedy is None or self.greedy.finished)

    @property
    def finished(self) -> FinishedGroup:
        """The group as it is delivered, once it is judged."""
        assert self.keeps is not None, f"group {self.group.number} is not judged"
        greedy = self.greedy.usable[0] if self.greedy is not None and self.greedy.usable else None
        counts = GroupCounts(self.tool_calls, self.failed_tool_calls, dict(self.reward_failures))
        return FinishedGroup(self.group.number, self.group, self.keeps, greedy, counts)

    def tasks(self, prompt: Prompt, seed: int, greedy: Sampling) -> list[Task]:
        """The responses that are not scored, the greedy one last. ``greedy``: its sampling."""
        group = self.group
        found = [
            Task(group.number, index, prompt, draft, (seed, group.step, prompt.prompt_id, group.first_sample + index))
            for index, (draft, scored) in enumerate(zip(group.samples, group.scored, strict=True))
            if not scored
        ]
        if self.greedy is not None and not self.greedy.finished:
            root = (seed, group.step, prompt.prompt_id, group.first_sample // len(group.samples))
            found.append(Task(group.number, GREEDY, prompt, self.greedy.samples[0], root, sampling=greedy))
        return found

    def with_response(self, index: int, sample: Sample, *, scored: bool, dropped: bool = False) -> HeldGroup:
        """The same with another response, or draft of one."""
        if index == GREEDY:
            assert self.greedy is not None
            return replace(self, greedy=self.greedy.with_sample(0, sample, scored=scored, dropped=dropped))
        return replace(self, group=self.group.with_sample(index, sample, scored=scored, dropped=dropped))

    def with_scored(self, found: Scored) -> HeldGroup:
        """The same with a scored response, and what it counts. A greedy response's tool calls do not count."""
        greedy = found.index == GREEDY
        counted = replace(
            self,
            tool_calls=self.tool_calls + (0 if greedy else found.tool_calls),
            failed_tool_calls=self.failed_tool_calls + (0 if greedy else found.failed_tool_calls),
            reward_failures=Counter(self.reward_failures) + Counter(found.failures),
        )
        return counted.with_response(found.index, found.sample, scored=True, dropped=found.dropped)


class Shelf:
    """The groups of one engine, by number, until ``forget``.

    A group starts at most ``max_staleness`` versions before its step. So an engine holds its share of
    (max_staleness + 1) * prompts_per_step groups that are kept, and of those between them that the filter refuses.
    """

    def __init__(self, keeps: Filter) -> None:
        self._keeps = keeps
        self.held: dict[int, HeldGroup] = {}

    def add(self, held: HeldGroup) -> None:
        """Adds a group of drafts."""
        number = held.group.number
        assert number not in self.held, f"group {number} is requested twice"
        self.held[number] = held

    def put(self, found: Iterable[Scored]) -> list[FinishedGroup]:
        """Adds scored responses; returns the groups that are finished with them, in the order of their numbers."""
        changed = set()
        for scored in found:
            if scored.group not in self.held:  # removed meanwhile
                continue
            self.held[scored.group] = self.held[scored.group].with_scored(scored)
            changed.add(scored.group)
        return [self._judge(number) for number in sorted(changed) if self.held[number].scored]

    def forget(self, cursor: int) -> None:
        """Removes the groups before ``cursor``, which the trainers have consumed."""
        unfinished = [number for number, held in self.held.items() if number < cursor and not held.scored]
        assert not unfinished, f"groups {unfinished} are consumed, but not finished"
        self.remove([], before=cursor)

    def remove(self, groups: Collection[int], before: int) -> None:
        """Removes groups that the trainers have consumed, perhaps those that another engine has started again."""
        for number in [number for number in self.held if number < before or number in groups]:
            del self.held[number]

    @property
    def delivered(self) -> list[FinishedGroup]:
        """The finished groups, in the order of their numbers."""
        return [held.finished for _, held in sorted(self.held.items()) if held.keeps is not None]

    def _judge(self, number: int) -> FinishedGroup:
        usable = self.held[number].group.usable
        self.held[number] = replace(self.held[number], keeps=bool(usable) and self._keeps(usable))
        return self.held[number].finished


def call_key(place: Place) -> int:
    """Number of a response by which its schedule knows its tool calls; equal in every attempt of a run."""
    group, index = place
    return group << _INDEX_BITS | index - GREEDY


def place_of(key: int) -> Place:
    """The response of a number."""
    return key >> _INDEX_BITS, (key & (1 << _INDEX_BITS) - 1) + GREEDY
