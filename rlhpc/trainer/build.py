"""The composition root: the only place that asks which back end and which engine are configured."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from rlhpc.algo import Algorithm, find_algorithm
from rlhpc.api import RewardWorkers, RolloutEngine
from rlhpc.backends.megatron import MegatronBackend
from rlhpc.config.schema import RunConfig
from rlhpc.core.context import RankContext
from rlhpc.core.folder import RunFolder
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
from rlhpc.sharding.layout import ParallelLayout
from rlhpc.trainer.carryover import Carryover
from rlhpc.trainer.models import Models, make_models
from rlhpc.trainer.reward_reader import RewardReader


@dataclass
class Run:
    """Everything that a rank works with."""

    config: RunConfig
    context: RankContext
    shape: ModelShape
    tokenizer: Tokenizer
    models: Models
    engine: RolloutEngine | None
    weights: ReshardManager | None  # keeps the engine's those of the actor
    algorithm: Algorithm
    reward_workers: RewardWorkers | None  # on the first rank of each engine
    tools: ToolUse | None
    carryover: Carryover
    prompts: PromptSet | None
    validation: PromptSet | None
    sft: SFTSet | None
    reward_reader: RewardReader | None

    @property
    def info(self) -> RankInfo:
        return self.context.info

    @property
    def folder(self) -> RunFolder:
        return self.context.run

    @property
    def layout(self) -> ParallelLayout:
        return self.models.layout

    @property
    def actor(self) -> MegatronBackend:
        return self.models.actor.model

    @property
    def reference(self) -> MegatronBackend | None:
        return self.models.reference and self.models.reference.model

    @property
    def critic(self) -> MegatronBackend | None:
        return self.models.critic and self.models.critic.model

    @property
    def engine_index(self) -> int:
        """Which of the job's engines this rank belongs to: engines are blocks of rollout.tp ranks."""
        return self.info.rank // self.config.rollout.tp

    @property
    def num_engines(self) -> int:
        return self.layout.world_size // self.config.rollout.tp

    @property
    def leads_engine(self) -> bool:
        """The first rank of its engine speaks for the others."""
        return self.info.rank % self.config.rollout.tp == 0


def build(config: RunConfig, context: RankContext) -> Run:
    """Build models, data and engine on this rank; the ranks have joined. Collective."""
    info = context.info
    shape = read_model(config.model.path, config.model.family)
    tokenizer = Tokenizer.load(config.model.path, shape.vocab_size, config.data)
    algorithm = find_algorithm(config.algorithm)
    rl = config.train.steps > 0

    generates = rl or bool(config.data.validation)
    # Rewards, tools and data first: what is wrong with them shows before the models take their time.
    reward_workers = _reward_workers(config, tokenizer, info) if generates else None
    schemas = tool_schemas(config.rollout.tools)
    tools = _tools(config, tokenizer, info) if generates and schemas else None
    reader = RewardReader.of(config, tokenizer) if generates else None
    readers = _readers(info)
    load = functools.partial(
        PromptSet.load,
        section=config.data,
        tokenizer=tokenizer,
        tools=schemas,
        readers=readers,
        texts=reader is not None and reader.own is not None,
    )
    prompts = load(PromptFiles(config.data.train, "data.train", filtered=True)) if rl else None
    validation = load(PromptFiles(config.data.validation, "data.validation")) if config.data.validation else None
    longest = shape.usable_positions
    sft = SFTSet.load(config.sft.data, tokenizer, longest, readers=readers) if config.sft else None
    models = make_models(config, info, shape, algorithm if rl else None)
    engine = _engine(config, shape, tokenizer) if generates else None
    return Run(
        config=config,
        context=context,
        shape=shape,
        tokenizer=tokenizer,
        models=models,
        engine=engine,
        weights=_manager(config, shape, models, engine) if engine is not None else None,
        algorithm=algorithm,
        reward_workers=reward_workers,
        tools=tools,
        carryover=Carryover.of(config.train),
        prompts=prompts,
        validation=validation,
        sft=sft,
        reward_reader=reader,
    )


def _readers(info: RankInfo) -> Readers:
    """All ranks read the data, and tokenize a part of it each."""

    def gather(part: Any) -> list[Any]:
        parts = [None] * info.world_size
        dist.all_gather_object(parts, part)
        return parts

    return Readers(info.rank, info.world_size, gather)


def _reward_workers(config: RunConfig, tokenizer: Tokenizer, info: RankInfo) -> RewardWorkers | None:
    if info.rank % config.rollout.tp:
        return None
    return start_reward_workers(config.reward, tokenizer.decode, config.rollout.max_response_tokens)


def _tools(config: RunConfig, tokenizer: Tokenizer, info: RankInfo) -> ToolUse:
    group = engine_group(info.world_size, info.rank, config.rollout.tp)
    return ToolUse(config.rollout, tokenizer, leads=info.rank % config.rollout.tp == 0, group=group)


def _engine(config: RunConfig, shape: ModelShape, tokenizer: Tokenizer) -> RolloutEngine:
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    served = ServedModel(config.model.path, shape, config.model.dtype, longest, tokenizer.end_tokens)
    return VllmEngine(served, config.rollout, routed_experts=config.train.experts.router_replay)


def _manager(config: RunConfig, shape: ModelShape, models: Models, engine: RolloutEngine) -> ReshardManager:
    cut = EngineLayout(config.rollout.tp, config.rollout.expert_parallel)
    job = Job(config.resources.ranks_per_node, getattr(torch, config.model.dtype), device())
    return ReshardManager(models.actor.model, engine, sync_sides(shape, models.layout, cut), config.reshard, job)
