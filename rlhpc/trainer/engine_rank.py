"""The program of a rank that only generates. Part of the composition root."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rlhpc.algo import find_algorithm
from rlhpc.api import RolloutEngine
from rlhpc.checkpoint.formats.described import resolve_model
from rlhpc.config.schema import RunConfig
from rlhpc.core.context import RankContext, Reason
from rlhpc.core.errors import PeerLost
from rlhpc.core.heartbeat import enter
from rlhpc.core.rank import RankInfo
from rlhpc.core.store_client import TrainersStart
from rlhpc.data.tokenizer import Tokenizer
from rlhpc.models import ModelDescription
from rlhpc.parallel.agreement import Facts, check_job_agreement
from rlhpc.parallel.board import Board
from rlhpc.parallel.channel import Inbox, ObjectChannel
from rlhpc.parallel.groups import follow, job_store, joined, present_trainers
from rlhpc.reshard.staged.target import WeightTarget
from rlhpc.rollout.generator.loop import Generator
from rlhpc.rollout.generator.parts import SHARE_SECONDS, EnginePlace, GeneratorParts, Links, TrainersLost
from rlhpc.sharding.placement import Placement, placement_of
from rlhpc.trainer.batches import Batching
from rlhpc.trainer.connect import EngineWires, job_sides, lender_channel, lenders_of, staged_job
from rlhpc.trainer.engine_models import EngineModels
from rlhpc.trainer.ground_truths import check_ground_truths
from rlhpc.trainer.handshake import Check, agreed_facts, wait_for_begin, wait_for_end
from rlhpc.trainer.models import models_beside_engine
from rlhpc.trainer.parts import Data, EngineParts, engine_parts, load_data, make_engine
from rlhpc.trainer.rejoin import Joining, ask_to_join, wait_for_call
from rlhpc.trainer.reward_model import RewardModel
from rlhpc.trainer.reward_reader import RewardReader
from rlhpc.trainer.roles import EngineRank

_LOOK_SECONDS = 0.2  # between two looks for the trainers' next start, while the engine waits for it
_WATCH_SECONDS = 1.0  # likewise while it generates
_log = logging.getLogger(__name__)


def run_engine(config: RunConfig, context: RankContext) -> Reason | None:
    """The program of a rank that only generates; the ranks have joined. Returns why the trainers stop early."""
    program = EngineProgram.build(config, context)
    reason = program.run()
    program.close()
    return reason


@dataclass
class EngineProgram:
    """State of an engine's rank for its whole life, across attempts of the trainers. ``info``: its place,
    with its generation as the present ones count it; ``facts``: what all ranks of the job agree on."""

    config: RunConfig
    info: RankInfo
    facts: Facts
    placement: Placement
    shape: ModelDescription
    parts: EngineParts
    data: Data
    engine: RolloutEngine
    models: EngineModels | None

    @classmethod
    def build(cls, config: RunConfig, context: RankContext) -> EngineProgram:
        """Loads data and models. Collective over the engine's ranks."""
        info, placement = context.info, placement_of(config, context.info.job_size)
        shape, facts = resolve_model(config), agreed_facts(config, context.attempt)
        tokenizer = Tokenizer.load(config.model.path, shape.vocab_size, config.data)
        place = EngineRank(info.rank, info.world_size, config.rollout.tp)  # in this world, perhaps one engine alone
        parts = engine_parts(config, tokenizer, place)
        scores = config.reward_model_on == "engines"
        reader = RewardReader.of(config, tokenizer, alone=True) if scores else None
        data = load_data(config, info, tokenizer, shape, texts=reader is not None and reader.own is not None)
        check_ground_truths(config, place, parts.reward_workers, data.prompts, data.validation)
        engine = make_engine(config, shape, tokenizer)
        models = models_of_engine(config, info, shape, data, tokenizer, reader)
        engine.check_memory()
        return cls(config, info, facts, placement, shape, parts, data, engine, models)

    def run(self) -> Reason | None:
        """Generates for the present trainers, and for those that are started again after them."""
        while True:
            place = self._place()
            try:
                return self._generate(place)
            except TrainersLost as lost:
                _log.warning("the trainers are lost, and this engine waits for their next start: %s", lost)
            self._follow(place)

    def close(self) -> None:
        """Ends what answers to the engine, and the engine."""
        self.parts.close()
        self.engine.shutdown()

    def _place(self) -> EnginePlace:
        leads, lenders, info = self.parts.place.leads, self.placement.num_lenders, self.info
        numbers = self.placement.engine_of(info.job_rank), self.placement.num_engines
        outlives = self.config.may_lose_engines
        return EnginePlace(*numbers, leads, self.parts.group, lenders, info.generation, outlives)

    def _generate(self, place: EnginePlace) -> Reason | None:
        """Connects with the present trainers, and generates until they end."""
        board, inbox = Board(job_store()), Inbox()
        check = TrainersWatch(inbox).check if place.outlives else inbox.check
        wires, generator = self._connect(place, board, inbox, check), None
        try:
            if wait_for_begin(place, board, check):
                own = board if place.leads else None
                links = Links(wires.target, own, wires.channel, wires.lenders, check)
                generator = Generator(self._made(place), links)
                generator.run()
            reason = wait_for_end(place, board, check)
        except TrainersLost:
            wires.drop()
            if generator is not None:
                generator.abandon()
            raise
        wires.close()
        return reason

    def _connect(self, place: EnginePlace, board: Board, inbox: Inbox, check: Check) -> _Wires:
        """Collective over the engine and the trainers."""
        config, info, placement, engine = self.config, self.info, self.placement, place.engine
        joining, first_version = Joining(engine, info.generation), 0
        if info.generation:
            if place.leads:
                ask_to_join(board, joining)
            first_version = wait_for_call(place, board, joining, check)
        channel = EngineWires(config, info, placement).open(joining, inbox) if place.leads else None
        job = staged_job(config, info)
        sides = job_sides(config, self.shape, placement, job, engine=self.engine)
        target = WeightTarget(sides, config.reshard, job, first_version, check if place.outlives else None)
        lenders = [
            lender_channel(info, lender, placement, inbox)
            for lender in range(engine, lenders_of(config, placement), placement.num_engines)
            if place.leads
        ]
        assert self.data.prompts is not None, "a separate placement has RL steps"
        digest = {"training prompts of digest": self.data.prompts.digest}
        check_job_agreement(info, digest, placement.beginning_ranks)
        return _Wires(target, channel, lenders)

    def _made(self, place: EnginePlace) -> GeneratorParts:
        config, parts, data = self.config, self.parts, self.data
        assert data.prompts is not None, "a separate placement has RL steps"
        greedy, rewards = find_algorithm(config.algorithm).needs_greedy, parts.reward_workers
        shared = (self.engine, rewards, parts.tools, data.prompts, data.validation)
        return GeneratorParts(config, place, *shared, greedy, self.models)

    def _follow(self, place: EnginePlace) -> None:
        """Waits for the trainers' next start, in which this engine begins once more. Without end: the launcher ends
        engines whose trainers do not come back."""
        while (start := place.shared(_next_start() if place.leads else None)) is None:
            pass
        follow(start)
        known = joined()
        assert known is not None
        self.info = replace(self.info, generation=start.generation_of(place.engine, known.info.generation))
        check_job_agreement(self.info, self.facts, self.placement.beginning_ranks)


@dataclass
class _Wires:
    """Connections to the trainers. The channel is on the engine's first rank only, and so are those to lenders."""

    target: WeightTarget
    channel: ObjectChannel | None
    lenders: Sequence[ObjectChannel]

    def close(self) -> None:
        """Disconnects when both sides have ended."""
        self.target.close()
        for each in (*self.lenders, *([self.channel] if self.channel is not None else [])):
            each.close()

    def drop(self) -> None:
        """Disconnects at once."""
        for each in (*self.lenders, *([self.channel] if self.channel is not None else [])):
            each.drop()
        self.target.close()


class TrainersWatch:
    """Looks whether the trainers that an engine's rank generates for are still there. The end of their processes does
    not always close connections: children that outlive them may have these open."""

    def __init__(
        self,
        inbox: Inbox,
        seconds: float = _WATCH_SECONDS,
        newer_start: Callable[[], TrainersStart | None] | None = None,
    ) -> None:
        """``seconds``: between two looks; ``newer_start``: asks the job's store by default."""
        self._inbox, self._seconds, self._looked = inbox, seconds, time.monotonic()
        self._newer_start = newer_start or _newer_start

    def check(self) -> None:
        """Raises PeerLost if they are lost, or others were started in their place."""
        self._inbox.check()
        if time.monotonic() - self._looked < self._seconds:
            return
        self._looked = time.monotonic()
        if self._newer_start() is not None:
            raise PeerLost("the trainers were started again")


def _newer_start() -> TrainersStart | None:
    """The trainers' newest start; None if it is the one that this rank belongs to."""
    known, start = joined(), present_trainers()
    assert known is not None
    return start if start.generation != known.trainers.generation else None


def _next_start() -> TrainersStart | None:
    """The trainers' next start; None if there is none in a while."""
    until = time.monotonic() + SHARE_SECONDS
    while (start := _newer_start()) is None and time.monotonic() < until:
        enter("waiting for trainers")
        time.sleep(_LOOK_SECONDS)
    return start


def models_of_engine(
    config: RunConfig,
    info: RankInfo,
    shape: ModelDescription,
    data: Data,
    tokenizer: Tokenizer,
    reader: RewardReader | None,
) -> EngineModels | None:
    """The models beside the engine, while it is asleep; None without any."""
    reference, scorer = models_beside_engine(config, info, shape, find_algorithm(config.algorithm))
    if reference is None and scorer is None:
        return None
    assert data.prompts is not None
    reward = None
    if scorer is not None:
        assert reader is not None
        reward = RewardModel(scorer, reader, tokenizer)
    batching = replace(Batching.of(config), minibatches=1)
    return EngineModels(reference, reward, batching, config.rollout.temperature, data.prompts, data.validation)
