"""What a step's rollout leaves to later steps. Equal on every rank, and a part of each checkpoint."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path

from rlhpc.config.schema import TrainSection
from rlhpc.data.groups import Group, load_groups, save_groups
from rlhpc.data.replay import ReplayBuffer
from rlhpc.plan.sampling import split_stale

_FILE = "groups.npz"
_log = logging.getLogger(__name__)


@dataclass
class Kept:
    """``ready``: finished groups worth learning from that had no place in a step; ``unfinished``: to be taken up again;
    ``replay``: groups learnt from already."""

    ready: list[Group] = field(default_factory=list)
    unfinished: list[Group] = field(default_factory=list)
    replay: ReplayBuffer | None = None

    @classmethod
    def of(cls, section: TrainSection) -> Kept:
        """Nothing yet."""
        return cls(replay=ReplayBuffer(section.replay) if section.replay else None)

    def forget_stale(self, weights_version: int, max_staleness: int) -> int:
        """Let go of groups for the next step whose oldest token is of too old weights; how many they were."""
        groups = {group.number: group for group in (*self.ready, *self.unfinished)}
        versions = {number: group.weights_version for number, group in groups.items()}
        fresh, stale = split_stale(versions, weights_version, max_staleness)
        self.ready = [group for group in self.ready if group.number in fresh]
        self.unfinished = [group for group in self.unfinished if group.number in fresh]
        return len(stale)

    def save(self, folder: Path) -> None:
        """Write all of it into a checkpoint's folder. On one rank."""
        replay = self.replay.groups if self.replay else []
        if self.ready or self.unfinished or replay:
            save_groups(folder / _FILE, {"ready": self.ready, "unfinished": self.unfinished, "replay": replay})

    def load(self, folder: Path, prompt_cursor: int) -> None:
        """Take up what ``save`` wrote; nothing of it where the prompts have begun anew since."""
        if not (folder / _FILE).is_file():
            return
        shelves = load_groups(folder / _FILE)
        if any(group.number >= prompt_cursor for groups in shelves.values() for group in groups):
            _log.warning("groups of other prompts than today's are let go")
            return
        self.ready, self.unfinished = shelves["ready"], shelves["unfinished"]
        if self.replay is not None:
            self.replay.add(shelves["replay"])
