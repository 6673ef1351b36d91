"""Replay buffer: groups of earlier steps, to be trained on again."""

from __future__ import annotations

import random
from collections.abc import Iterable

from rlhpc.config.rollout import ReplaySection
from rlhpc.data.groups import Group


class ReplayBuffer:
    """The newest ``capacity`` groups, oldest first. The same on every rank."""

    def __init__(self, section: ReplaySection, groups: Iterable[Group] = ()) -> None:
        self._section = section
        self.groups: list[Group] = []
        self.add(groups)

    def __len__(self) -> int:
        return len(self.groups)

    def add(self, groups: Iterable[Group]) -> None:
        """Adds the groups of a step; drops the oldest beyond the capacity."""
        self.groups = [*self.groups, *groups][-self._section.capacity :]

    def forget_stale(self, policy_version: int) -> None:
        """Drops groups with more than the maximum staleness."""
        oldest = policy_version - self._section.max_staleness
        self.groups = [group for group in self.groups if group.policy_version >= oldest]

    def sample(self, count: int, seed: int, step: int) -> list[Group]:
        """``count`` distinct groups, oldest first, which stay in the buffer. Determined by the arguments."""
        assert count <= len(self.groups), f"{count} of {len(self.groups)} groups"
        if self._section.order == "newest":
            return self.groups[len(self.groups) - count :]
        places = random.Random(f"replay:{seed}:{step}").sample(range(len(self.groups)), count)
        return [self.groups[place] for place in sorted(places)]
