"""Groups of former steps, kept to be learnt from again."""

from __future__ import annotations

import random
from collections.abc import Iterable

from rlhpc.config.rollout import ReplaySection
from rlhpc.data.groups import Group


class ReplayBuffer:
    """The newest ``capacity`` groups, oldest first. Every rank keeps the same ones."""

    def __init__(self, section: ReplaySection, groups: Iterable[Group] = ()) -> None:
        self._section = section
        self.groups: list[Group] = []
        self.add(groups)

    def __len__(self) -> int:
        return len(self.groups)

    def add(self, groups: Iterable[Group]) -> None:
        """Keep the groups of a step; those beyond the capacity leave, the oldest first."""
        self.groups = [*self.groups, *groups][-self._section.capacity :]

    def forget_stale(self, policy_version: int) -> None:
        """Let go of what today's weights must not learn from any more."""
        oldest = policy_version - self._section.max_staleness
        self.groups = [group for group in self.groups if group.policy_version >= oldest]

    def draw(self, count: int, seed: int, step: int) -> list[Group]:
        """``count`` different groups, oldest first; they stay in the buffer. The same for the same arguments."""
        assert count <= len(self.groups), f"{count} of {len(self.groups)} groups"
        if self._section.order == "newest":
            return self.groups[len(self.groups) - count :]
        places = random.Random(f"replay:{seed}:{step}").sample(range(len(self.groups)), count)
        return [self.groups[place] for place in sorted(places)]
