"""Groups that a step leaves to later steps. Equal on every rank except for routed experts (see
``rlhpc.trainer.routed_experts``); part of each checkpoint."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rlhpc.api import Prompt
from rlhpc.config.schema import TrainSection
from rlhpc.core.files import names_in
from rlhpc.core.storage import exists, patiently
from rlhpc.data.groups import Group, ReplayBuffer, load_groups, save_groups, save_routed_experts, with_routed_experts_of
from rlhpc.rollout.response_lengths import ResponseLengths
from rlhpc.trainer.sampling_plan import split_stale

_FILE = "groups.npz"
_ROUTED_EXPERTS = "routed_experts-{}.npz"  # of a rank other than the first
_log = logging.getLogger(__name__)


@dataclass
class Carryover:
    """``ready``: finished surplus groups; ``unfinished``: groups to resume; ``replay``: groups of former steps;
    ``lengths``: of the responses of former steps."""

    ready: list[Group] = field(default_factory=list)
    unfinished: list[Group] = field(default_factory=list)
    replay: ReplayBuffer | None = None
    lengths: ResponseLengths = field(default_factory=ResponseLengths)

    @classmethod
    def of(cls, section: TrainSection) -> Carryover:
        """Empty, with a replay buffer if configured."""
        return cls(replay=ReplayBuffer(section.replay) if section.replay else None)

    @property
    def groups(self) -> list[Group]:
        """Groups for the next step, finished or not."""
        return [*self.ready, *self.unfinished]

    def forget_stale(self, policy_version: int, max_staleness: int) -> list[Group]:
        """Drops groups for the next step whose oldest token exceeds the maximum staleness, and returns them. Steps wait
        for groups before they do (``StepPlan.waits``): there are some only where a resumed run has lowered the maximum.
        """
        groups = {group.number: group for group in self.groups}
        versions = {number: group.policy_version for number, group in groups.items()}
        fresh, stale = split_stale(versions, policy_version, max_staleness)
        self.ready = [group for group in self.ready if group.number in fresh]
        self.unfinished = [group for group in self.unfinished if group.number in fresh]
        return [groups[number] for number in sorted(stale)]

    def put_back(self, groups: Sequence[Group]) -> None:
        """Returns the groups of a step with too few samples, to be the first of the next step. Groups with dropped
        samples are left out, because with them the next step would have too few again."""
        self.ready = [*(group for group in groups if not any(group.dropped)), *self.ready]

    def save(self, folder: Path, rank: int = 0) -> None:
        """Writes them into a checkpoint's folder: the first rank everything but the routed experts of other ranks.
        Called on every rank."""
        replay = self.replay.groups if self.replay else []
        if rank == 0:
            self.lengths.save(folder)
        else:
            save_routed_experts(folder / _ROUTED_EXPERTS.format(rank), [*self.groups, *replay])
        if rank == 0 and (self.ready or self.unfinished or replay):
            save_groups(folder / _FILE, {"ready": self.ready, "unfinished": self.unfinished, "replay": replay})

    def load(
        self,
        folder: Path,
        prompt_cursor: int,
        prompt_at: Callable[[int], Prompt],
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        """Restores what ``save`` wrote, on any number of ranks; nothing if the prompts or their order have changed.

        ``prompt_at`` gives the prompt at a place of the present order.
        """
        self.lengths.load(folder)
        file = folder / _FILE
        if not exists(file):
            return
        shelves = patiently(lambda: load_groups(file, routed_experts=rank == 0), file)
        groups = sorted((group for shelf in shelves.values() for group in shelf), key=lambda group: group.number)
        if any(group.number >= prompt_cursor or not group.answers(prompt_at(group.number)) for group in groups):
            _log.warning("groups of the checkpoint are dropped: the prompts or their order have changed")
            return
        for name in names_in(folder, _ROUTED_EXPERTS.format("*")):
            if int(Path(name).stem.partition("-")[2]) % ranks == rank:
                shelves = patiently(functools.partial(_with_routed_experts, folder / name, shelves), folder / name)
        self.ready, self.unfinished = shelves["ready"], shelves["unfinished"]
        if self.replay is not None:
            self.replay.add(shelves["replay"])


def _with_routed_experts(file: Path, shelves: dict[str, list[Group]]) -> dict[str, list[Group]]:
    return {name: with_routed_experts_of(file, shelf) for name, shelf in shelves.items()}
