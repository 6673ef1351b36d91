"""The composition root: the only place, with ``models.py``, that names the concrete back end, engine and reward
workers."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from rlhpc.algo import find_algorithm
from rlhpc.api import RewardWorkers, RolloutEngine
from rlhpc.backends.megatron import end_writers
from rlhpc.config.schema import RunConfig
from rlhpc.core.context import RankContext
from rlhpc.core.heartbeat import enter
from rlhpc.core.rank import RankInfo
from rlhpc.data.prompts import PromptFiles, PromptSet, Readers
from rlhpc.data.sft import SFTSet
from rlhpc.data.tokenizer import Tokenizer
from rlhpc.models import ModelShape, read_model
from rlhpc.parallel.compat import device
from rlhpc.parallel.groups import engine_group
from rlhpc.reshard.manager import Job, ReshardManager
from rlhpc.reshard.sides import sync_sides
from rlhpc.rewards.reward_workers import start_reward_workers
from rlhpc.rollout.tool_kinds import tool_schemas
from rlhpc.rollout.tools import ToolUse
from rlhpc.rollout.vllm_arguments import ServedModel
from rlhpc.rollout.vllm_engine import VllmEngine
from rlhpc.sharding.engine_shards import EngineLayout
from rlhpc.trainer.batches import Batching
from rlhpc.trainer.carryover import Carryover
from rlhpc.trainer.choosing import Chooser
from rlhpc.trainer.colocated import Colocated
from rlhpc.trainer.evaluate import Evaluator
from rlhpc.trainer.ground_truths import check_ground_truths
from rlhpc.trainer.models import make_models
from rlhpc.trainer.reward_model import RewardModel
from rlhpc.trainer.reward_reader import RewardReader
from rlhpc.trainer.roles import EngineRank, Models
from rlhpc.trainer.rollout import Rollout
from rlhpc.trainer.run import Run
from rlhpc.trainer.sampling import Sampler
from rlhpc.trainer.training_samples import SampleTexts
from rlhpc.trainer.update import Updater


def build(config: RunConfig, context: RankContext) -> Run:
    """Builds models, data and engine on this rank; the ranks have joined. Collective."""
    info = context.info
    shape = read_model(config.model.path, config.model.family)
    tokenizer = Tokenizer.load(config.model.path, shape.vocab_size, config.data)
    algorithm = find_algorithm(config.algorithm)
    rl = config.train.steps > 0
    generates = rl or bool(config.data.validation)
    place = EngineRank(info.rank, info.world_size, config.rollout.tp)
    # Rewards, tools and data first: errors in them show before the models take their time to load. Then the engine,
    # which needs its whole share of the GPU free, and sleeps while the models and their optimizer states are built.
    parts = _engine_parts(config, tokenizer, place) if generates else None
    data = _load_data(config, info, tokenizer, shape, reader=parts.reader if parts is not None else None)
    if parts is not None:
        check_ground_truths(config, place, parts.reward_workers, data.prompts, data.validation)
    engine = _engine(config, shape, tokenizer) if generates else None
    models = make_models(config, info, shape, algorithm if rl else None)
    if engine is not None:
        engine.check_memory()
    batching, carryover = Batching.of(config), Carryover.of(config.train)
    run = Run(
        config=config,
        context=context,
        models=models,
        algorithm=algorithm,
        batching=batching,
        updater=Updater(config, context, models, batching, algorithm),
        carryover=carryover,
        sft=data.sft,
        closers=(end_writers,),
    )
    if parts is not None and engine is not None:
        _add_rollouts(run, tokenizer, engine, parts, data)
    return run


@dataclass
class _EngineParts:
    """What answers to an engine, and what reads for a reward model."""

    place: EngineRank
    reward_workers: RewardWorkers | None  # on the engine's first rank
    tools: ToolUse | None
    reader: RewardReader | None


@dataclass
class _Data:
    prompts: PromptSet | None
    validation: PromptSet | None
    sft: SFTSet | None


def _add_rollouts(run: Run, tokenizer: Tokenizer, engine: RolloutEngine, parts: _EngineParts, data: _Data) -> None:
    """Adds what generates with the engine."""
    config, models = run.config, run.models
    rollout = Rollout(engine, parts.place, config.rollout, config.seed, parts.reward_workers, parts.tools)
    weights = _manager(config, models, engine)
    scorer = None
    if models.reward is not None:
        assert parts.reader is not None
        scorer = RewardModel(models.reward, parts.reader, tokenizer)
    if data.prompts is not None:
        needs_greedy, least = run.algorithm.needs_greedy, _least_samples(config, models)
        chooser = Chooser(config, data.prompts, run.carryover, scorer, least, needs_greedy)
        run.rl = Colocated(weights, Sampler(rollout, chooser))
        run.texts = SampleTexts(tokenizer, data.prompts.numbered, tools=bool(config.rollout.tools))
    if data.validation is not None:
        run.evaluator = Evaluator(config, run.context, data.validation, tokenizer, rollout, weights, scorer)
    users = [user for user in (parts.reward_workers, parts.tools) if user is not None]
    run.closers = (*(user.close for user in users), engine.shutdown, *run.closers)


def _least_samples(config: RunConfig, models: Models) -> int:
    """Fewer samples cannot feed every data-parallel rank in every minibatch."""
    return config.train.minibatches * max(role.layout.dp for role in models.trained.values())


def _engine_parts(config: RunConfig, tokenizer: Tokenizer, place: EngineRank) -> _EngineParts:
    workers = _reward_workers(config, tokenizer) if place.leads else None
    tools = None
    if config.rollout.tools:
        group = engine_group(place.world_size, place.rank, place.tp)
        tools = ToolUse(config.rollout, tokenizer, leads=place.leads, group=group)
    return _EngineParts(place, workers, tools, RewardReader.of(config, tokenizer))


def _reward_workers(config: RunConfig, tokenizer: Tokenizer) -> RewardWorkers:
    enter("starting reward workers")
    limit = config.rollout.max_response_tokens
    return start_reward_workers(config.reward_functions, config.reward_workers, tokenizer.decode, limit)


def _load_data(
    config: RunConfig, info: RankInfo, tokenizer: Tokenizer, shape: ModelShape, *, reader: RewardReader | None
) -> _Data:
    readers = _readers(info)
    load = functools.partial(
        PromptSet.load,
        section=config.data,
        tokenizer=tokenizer,
        tools=tool_schemas(config.rollout.tools),
        readers=readers,
        texts=reader is not None and reader.own is not None,
    )
    section = config.data
    return _Data(
        load(PromptFiles(section.train, "data.train", filtered=True)) if config.train.steps else None,
        load(PromptFiles(section.validation, "data.validation")) if section.validation else None,
        SFTSet.load(config.sft.data, tokenizer, shape.usable_positions, readers=readers) if config.sft else None,
    )


def _readers(info: RankInfo) -> Readers:
    """All ranks read the data; each tokenizes a part of it."""

    def gather(part: Any) -> list[Any]:
        parts = [None] * info.world_size
        dist.all_gather_object(parts, part)
        return parts

    return Readers(info.rank, info.world_size, gather)


def _engine(config: RunConfig, shape: ModelShape, tokenizer: Tokenizer) -> RolloutEngine:
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    served = ServedModel(config.model.path, shape, config.model.dtype, longest, tokenizer.end_tokens)
    return VllmEngine(served, config.rollout, routed_experts=config.actor.moe.router_replay)


def _manager(config: RunConfig, models: Models, engine: RolloutEngine) -> ReshardManager:
    shape = models.actor.model.shape
    cut = EngineLayout(config.rollout.tp, config.rollout.expert_parallel)
    job = Job(config.resources.ranks_per_node, getattr(torch, config.model.dtype), device())
    return ReshardManager(models.actor.model, engine, sync_sides(shape, models.actor.layout, cut), config.reshard, job)
