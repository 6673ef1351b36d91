"""The program of a rank that only generates. Part of the composition root."""

from __future__ import annotations

from dataclasses import replace

from rlhpc.algo import find_algorithm
from rlhpc.checkpoint.formats.described import resolve_model
from rlhpc.config.schema import RunConfig
from rlhpc.core.context import RankContext
from rlhpc.core.rank import RankInfo
from rlhpc.core.stop import Reason
from rlhpc.data.tokenizer import Tokenizer
from rlhpc.models import ModelDescription
from rlhpc.parallel.agreement import check_job_agreement
from rlhpc.parallel.board import Board
from rlhpc.parallel.channel import Inbox
from rlhpc.parallel.groups import job_store
from rlhpc.reshard.staged.target import WeightTarget
from rlhpc.rollout.generator.loop import Generator
from rlhpc.rollout.generator.parts import EnginePlace, GeneratorParts, Links
from rlhpc.sharding.placement import placement_of
from rlhpc.trainer.batches import Batching
from rlhpc.trainer.connect import EngineWires, job_sides, lender_channel, lenders_of, staged_job
from rlhpc.trainer.engine_models import EngineModels
from rlhpc.trainer.ground_truths import check_ground_truths
from rlhpc.trainer.handshake import wait_for_begin, wait_for_end
from rlhpc.trainer.models import models_beside_engine
from rlhpc.trainer.parts import Data, engine_parts, load_data, make_engine
from rlhpc.trainer.rejoin import Joining, ask_to_join, wait_for_call
from rlhpc.trainer.reward_model import RewardModel
from rlhpc.trainer.reward_reader import RewardReader
from rlhpc.trainer.roles import EngineRank


def run_engine(config: RunConfig, context: RankContext) -> Reason | None:
    """The program of a rank that only generates; the ranks have joined. Returns why the trainers stop early."""
    info, placement = context.info, placement_of(config, context.info.job_size)
    shape = resolve_model(config)
    tokenizer = Tokenizer.load(config.model.path, shape.vocab_size, config.data)
    place = EngineRank(info.rank, info.world_size, config.rollout.tp)  # in this world, which may be one engine alone
    engine_number = placement.engine_of(info.job_rank)
    parts = engine_parts(config, tokenizer, place)
    scores = config.reward_model_on == "engines"
    reader = RewardReader.of(config, tokenizer, alone=True) if scores else None
    data = load_data(config, info, tokenizer, shape, texts=reader is not None and reader.own is not None)
    check_ground_truths(config, place, parts.reward_workers, data.prompts, data.validation)
    engine = make_engine(config, shape, tokenizer)
    models = models_of_engine(config, info, shape, data, tokenizer, reader)
    engine.check_memory()
    board, joining = Board(job_store()), Joining(engine_number, info.generation)
    first_version = 0
    if info.generation:
        if place.leads:
            ask_to_join(board, joining)
        first_version = wait_for_call(board, joining)
    channel = EngineWires(config, info, placement).open(joining, Inbox()) if place.leads else None
    job = staged_job(config, info)
    target = WeightTarget(job_sides(config, shape, placement, job, engine=engine), config.reshard, job, first_version)
    inbox = channel.inbox if channel is not None else Inbox()
    lenders = [
        lender_channel(info, lender, placement, inbox)
        for lender in range(engine_number, lenders_of(config, placement), placement.num_engines)
        if place.leads
    ]
    assert data.prompts is not None, "a separate placement has RL steps"
    check_job_agreement(info, {"training prompts of digest": data.prompts.digest}, placement.beginning_ranks)
    if wait_for_begin(board, inbox):
        links = Links(target, board if place.leads else None, channel, lenders)
        shared = (parts.group, placement.num_lenders, info.generation)
        own = EnginePlace(engine_number, placement.num_engines, place.leads, *shared)
        greedy = find_algorithm(config.algorithm).needs_greedy
        made = GeneratorParts(
            config, own, engine, parts.reward_workers, parts.tools, data.prompts, data.validation, greedy, models
        )
        Generator(made, links).run()
    reason = wait_for_end(board, inbox)
    target.close()
    for each in (*lenders, *([channel] if channel is not None else [])):
        each.close()
    parts.close()
    engine.shutdown()
    return reason


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
