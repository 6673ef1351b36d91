"""Builds what engines need on a rank: data, reward workers, tools, the engine. Part of the composition root."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from rlhpc.api import RewardWorkers, RolloutEngine
from rlhpc.backends.kernels.compiled import choose_compilation
from rlhpc.config.schema import RunConfig
from rlhpc.core.errors import UserError, did_you_mean
from rlhpc.core.heartbeat import enter
from rlhpc.core.rank import RankInfo
from rlhpc.data.prompts import PromptFiles, PromptSet, Readers
from rlhpc.data.sft import SFTSet
from rlhpc.data.tokenizer import Tokenizer
from rlhpc.models import ModelDescription
from rlhpc.parallel.groups import engine_group
from rlhpc.plan.estimates.memory import sequence_tokens
from rlhpc.rewards.reward_workers import start_reward_workers
from rlhpc.rollout.tool_kinds import tool_schemas
from rlhpc.rollout.tools import ToolUse
from rlhpc.rollout.vllm_arguments import ServedModel
from rlhpc.rollout.vllm_engine import VllmEngine
from rlhpc.trainer.roles import EngineRank


@dataclass
class EngineParts:
    """Rewards and tools of an engine. ``group``: CPU group of the engine's ranks, None for an engine of one."""

    place: EngineRank
    reward_workers: RewardWorkers | None  # on the engine's first rank
    tools: ToolUse | None
    group: dist.ProcessGroup | None = None

    def close(self) -> None:
        """Ends reward workers and tools."""
        for user in (self.reward_workers, self.tools):
            if user is not None:
                user.close()


@dataclass
class Data:
    """The prompts and examples of a run."""

    prompts: PromptSet | None
    validation: PromptSet | None
    sft: SFTSet | None


def engine_parts(config: RunConfig, tokenizer: Tokenizer, place: EngineRank) -> EngineParts:
    """Starts what answers to the engine of this rank. Collective."""
    workers = _reward_workers(config, tokenizer) if place.leads else None
    if not config.rollout.tools and config.placement == "colocated":
        return EngineParts(place, workers, None)
    group = engine_group(place.world_size, place.rank, place.tp)
    tools = ToolUse(config.rollout, tokenizer, leads=place.leads, group=group) if config.rollout.tools else None
    return EngineParts(place, workers, tools, group)


def _reward_workers(config: RunConfig, tokenizer: Tokenizer) -> RewardWorkers:
    enter("starting reward workers")
    limit = config.rollout.max_response_tokens
    return start_reward_workers(config.reward_functions, config.reward_workers, tokenizer.decode, limit)


def load_data(config: RunConfig, info: RankInfo, tokenizer: Tokenizer, shape: ModelDescription, *, texts: bool) -> Data:
    """Loads the files that the config names. Collective. ``texts``: prompts keep what they were tokenized from."""
    readers = _readers(info)
    load = functools.partial(
        PromptSet.load,
        section=config.data,
        tokenizer=tokenizer,
        tools=tool_schemas(config.rollout.tools),
        readers=readers,
        texts=texts,
    )
    section = config.data
    prompts = load(PromptFiles(section.train, "data.train", filtered=True)) if config.train.steps else None
    validation = load(PromptFiles(section.validation, "data.validation")) if section.validation else None
    check_sources(config, [found for found in (prompts, validation) if found is not None])
    positions = shape.positions_in(sequence_tokens(config))
    return Data(
        prompts,
        validation,
        SFTSet.load(config.sft, tokenizer, positions, readers) if config.sft else None,
    )


def check_sources(config: RunConfig, sets: Sequence[PromptSet]) -> None:
    """Refuses options of sampling for a data source that no prompt has."""
    named = config.rollout.sampling_by_source
    known = {row.data_source for found in sets for row in found.prompts.rows} if named and sets else None
    for source in named:
        if known is not None and source not in known:
            where, remedy = f"rollout.sampling_by_source.{source}", did_you_mean(source, known)
            raise UserError("no prompt has this data source", where=where, remedy=remedy)


def _readers(info: RankInfo) -> Readers:
    """All ranks read the data; each tokenizes a part of it."""

    def gather(part: Any) -> list[Any]:
        parts = [None] * info.world_size
        dist.all_gather_object(parts, part)
        return parts

    return Readers(info.rank, info.world_size, gather)


def make_engine(config: RunConfig, shape: ModelDescription, tokenizer: Tokenizer) -> RolloutEngine:
    """The engine of this rank, asleep. Collective over the engine's ranks."""
    choose_compilation(config.train.compile)  # ranks that only generate have no trainer's models
    rollout = config.rollout
    sources = (None, *rollout.sampling_by_source)
    samplings = [rollout.sampling_of(source, use) for source in sources for use in (None, config.validation.sampling)]
    served = ServedModel(
        config.model.path,
        shape,
        config.model.dtype,
        sequence_tokens(config),
        tokenizer.end_tokens,
        config.model.trust_remote_code,
        reads_text=any(sampling.needs_text for sampling in samplings),
        rope_tokens=config.model.rope_tokens,
    )
    return VllmEngine(served, config.rollout, routed_experts=config.actor.moe.router_replay)
