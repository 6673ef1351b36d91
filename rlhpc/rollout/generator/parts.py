"""Parts of a generator, as the composition root builds them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar, cast

import torch.distributed as dist

from rlhpc.api import RewardWorkers, RolloutEngine
from rlhpc.config.schema import RunConfig
from rlhpc.core.errors import PeerLost
from rlhpc.data.prompts import PromptSet
from rlhpc.parallel.board import Board
from rlhpc.parallel.channel import ObjectChannel
from rlhpc.rollout.collect import Dialogue, Scored
from rlhpc.rollout.generator.messages import FinishedGroup

SHARE_SECONDS = 5.0  # after which other ranks of an engine hear of it again: shorter than any timeout of a group
T = TypeVar("T")


class ArrivingWeights(Protocol):
    """New weights on their way to the engine, on each of its ranks; see ``rlhpc.reshard.staged.target``."""

    def ready(self, version: int) -> bool:
        """True if ``version`` has arrived."""

    def wait(self, version: int) -> None:
        """Waits until it has."""

    def write(self, engine: RolloutEngine, version: int) -> None:
        """Writes it into the engine, whose requests may be in flight."""


class FrozenModels(Protocol):
    """Models beside the engine, in slices on its ranks: the reference, the reward model, or both. Calls are collective
    over these ranks, and what is found of a group does not depend on others."""

    def score(self, groups: Sequence[FinishedGroup]) -> list[FinishedGroup]:
        """The groups with the reference's log-probs of their samples, and the reward model's part of rewards. As equal
        on every rank as its inputs are."""

    def score_held_out(self, found: Sequence[Scored]) -> list[Scored]:
        """Answers to held-out prompts, by places among these, with the reward model's part of rewards."""


class TrainersLost(Exception):
    """The trainers have ended, or do not answer this engine. Raised on all ranks of an engine that outlives them."""


@dataclass(frozen=True)
class EnginePlace:
    """This rank among the engines. ``leads``: it is its engine's first rank, which decides for the others; ``group``:
    CPU group of the engine's ranks, None for an engine of one; ``lenders``: number of engines on trainers' ranks;
    ``generation``: how often the trainers have seen it begin before; ``outlives``: it waits for trainers that are
    started again."""

    engine: int
    engines: int
    leads: bool
    group: dist.ProcessGroup | None = None
    lenders: int = 0
    generation: int = 0
    outlives: bool = False

    def agreed(self, find: Callable[[], T | None]) -> T | None:
        """Calls ``find`` on the engine's first rank and shares the result with all its ranks. Raises TrainersLost on
        all if it has met the loss of the trainers."""
        found, lost = None, ""
        if self.leads:
            try:
                found = find()
            except Exception as error:
                lost = self._lost_trainers(error)
        found, lost = self.shared((found, lost))
        if lost:
            raise TrainersLost(lost)
        return found

    def together(self, action: Callable[[], object]) -> None:
        """Each rank does something with the trainers. Raises TrainersLost on all if one has met their loss."""
        lost = ""
        try:
            action()
        except Exception as error:
            lost = self._lost_trainers(error)
        if self.outlives and self.group is not None:
            met = [""] * self.group.size()
            dist.all_gather_object(met, lost, group=self.group)
            lost = next(filter(None, met), "")
        if lost:
            raise TrainersLost(lost)

    def _lost_trainers(self, error: Exception) -> str:
        """Loss of the trainers; raises any other error again, and every one on an engine that ends with them."""
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, PeerLost):
            cause = cause.__cause__ or cause.__context__
        if not self.outlives or cause is None:
            raise error
        return str(error) or type(error).__name__

    def shared(self, value: T | None) -> T:
        """The first rank's value on every rank of the engine, which call it alike."""
        if self.group is None:
            return cast(T, value)
        box = [value]
        dist.broadcast_object_list(box, src=dist.get_global_rank(self.group, 0), group=self.group)
        return cast(T, box[0])


@dataclass(frozen=True)
class Links:
    """Connections of an engine with the others. ``board`` and ``channel`` (to the trainers' first rank) are on its
    first rank only, and so are ``lenders``: channels to those of its lenders, in their order. ``check``: raises
    PeerLost if the trainers are lost; by default, if the channel is."""

    weights: ArrivingWeights
    board: Board | None
    channel: ObjectChannel | None
    lenders: Sequence[ObjectChannel] = ()
    check: Callable[[], object] | None = None


@dataclass(frozen=True)
class GeneratorParts:
    """One engine on this rank, and what it answers. ``reward_workers``: on its first rank only; ``validation``: the
    held-out prompts, None without any; ``needs_greedy``: the algorithm compares with greedy responses; ``models``:
    those that score groups before they are delivered, None without any."""

    config: RunConfig
    place: EnginePlace
    engine: RolloutEngine
    reward_workers: RewardWorkers | None
    tools: Dialogue | None
    prompts: PromptSet
    validation: PromptSet | None = None
    needs_greedy: bool = False
    models: FrozenModels | None = None
