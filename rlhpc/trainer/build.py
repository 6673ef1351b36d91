"""The composition root: the only place that asks which back end and which engine are configured."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from rlhpc.algo import Algorithm, find_algorithm
from rlhpc.api import Completion, Prompt, RolloutEngine
from rlhpc.backends.megatron import MegatronBackend
from rlhpc.config.schema import OptimizerSection, RunConfig
from rlhpc.core.context import RankContext
from rlhpc.core.folder import RunFolder
from rlhpc.core.rank import RankInfo
from rlhpc.data.prompts import PromptSet, Readers
from rlhpc.data.sft import SFTSet
from rlhpc.data.tokenizer import Tokenizer
from rlhpc.models import ModelShape, read_model
from rlhpc.parallel.compat import device
from rlhpc.parallel.groups import Groups, build_groups
from rlhpc.plan.engine import EngineLayout
from rlhpc.plan.layout import ParallelLayout, make_layout
from rlhpc.plan.push import push_sides
from rlhpc.reshard import Job, ReshardManager
from rlhpc.rewards.direct import load_reward
from rlhpc.rollout.vllm_engine import VllmEngine
from rlhpc.trainer.roles import Role


@dataclass
class Run:
    """Everything that a rank works with."""

    config: RunConfig
    context: RankContext
    layout: ParallelLayout
    shape: ModelShape
    tokenizer: Tokenizer
    actor: MegatronBackend
    reference: MegatronBackend | None
    critic: MegatronBackend | None
    engine: RolloutEngine | None
    weights: ReshardManager | None  # keeps the engine's those of the actor
    algorithm: Algorithm
    score: Callable[[Prompt, Completion], float]
    prompts: PromptSet | None
    validation: PromptSet | None
    sft: SFTSet | None

    @property
    def info(self) -> RankInfo:
        return self.context.info

    @property
    def folder(self) -> RunFolder:
        return self.context.run

    @property
    def actor_role(self) -> Role:
        train = self.config.train
        passing = train.log_prob_tokens_per_microbatch or train.tokens_per_microbatch
        return Role(self.actor, train.tokens_per_microbatch, passing)

    @property
    def reference_role(self) -> Role | None:
        return self.reference and replace(self.actor_role, model=self.reference)

    @property
    def critic_role(self) -> Role | None:
        tokens = self.config.critic.tokens_per_microbatch or self.config.train.tokens_per_microbatch
        return self.critic and Role(self.critic, tokens, tokens)

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
    layout = make_layout(config.parallel, info.world_size)
    build_groups(layout, config.seed)
    shape = read_model(config.model.path, config.model.family)
    tokenizer = Tokenizer.load(config.model.path, shape.vocab_size, config.data)
    algorithm = find_algorithm(config.algorithm)
    rl = config.train.steps > 0

    def model(optimizer: OptimizerSection | None) -> MegatronBackend:
        backend = MegatronBackend(
            shape, layout, info, config.model.dtype, config.parallel, optimizer, config.train.experts, config.memory
        )
        backend.load_pretrained(config.model.path)
        if optimizer is None:
            backend.offload()
        return backend

    reward = load_reward(config.reward)
    # Data first: what is wrong with it shows before the models take their time.
    load = functools.partial(PromptSet.load, section=config.data, tokenizer=tokenizer, readers=_readers(info))
    prompts = load(config.data.train, where="data.train", filtered=True) if rl else None
    validation = load(config.data.validation, where="data.validation") if config.data.validation else None
    sft = SFTSet.load(config.sft.data, tokenizer) if config.sft else None
    actor = model(config.sft.optimizer if config.sft else config.train.optimizer)
    reference = model(None) if rl and algorithm.needs_reference(config.algorithm) else None
    critic = _critic(config, shape, layout, info) if rl and algorithm.needs_critic else None
    engine = _engine(config, shape, tokenizer) if rl or validation else None
    return Run(
        config=config,
        context=context,
        layout=layout,
        shape=shape,
        tokenizer=tokenizer,
        actor=actor,
        reference=reference,
        critic=critic,
        engine=engine,
        weights=_manager(config, shape, layout, actor, engine) if engine is not None else None,
        algorithm=algorithm,
        score=lambda prompt, completion: reward(prompt, tokenizer.decode(completion.tokens)),
        prompts=prompts,
        validation=validation,
        sft=sft,
    )


def _critic(config: RunConfig, shape: ModelShape, actor: ParallelLayout, info: RankInfo) -> MegatronBackend:
    """The second model that is trained, in groups of its own where it is cut otherwise."""
    section = config.critic
    folder, parallel = section.model or config.model.path, section.parallel or config.parallel
    if section.model is not None:
        shape = read_model(folder)
    layout = make_layout(parallel, info.world_size)
    critic = MegatronBackend(
        shape.with_value_head,
        layout,
        info,
        config.model.dtype,
        parallel,
        section.optimizer,
        config.train.experts.model_copy(update={"replay_routes": False}),
        section.memory or config.memory,
        groups=Groups(layout) if layout != actor else None,
    )
    critic.load_pretrained(folder)
    critic.offload()
    return critic


def _readers(info: RankInfo) -> Readers:
    """All ranks read the data, and tokenize a part of it each."""

    def gather(part: Any) -> list[Any]:
        parts = [None] * info.world_size
        dist.all_gather_object(parts, part)
        return parts

    return Readers(info.rank, info.world_size, gather)


def _engine(config: RunConfig, shape: ModelShape, tokenizer: Tokenizer) -> RolloutEngine:
    return VllmEngine(
        config.model.path,
        shape,
        config.rollout,
        dtype=config.model.dtype,
        max_model_len=config.data.max_prompt_tokens + config.rollout.max_response_tokens,
        end_tokens=tokenizer.end_tokens,
        routes=config.train.experts.replay_routes,
    )


def _manager(
    config: RunConfig, shape: ModelShape, layout: ParallelLayout, actor: MegatronBackend, engine: RolloutEngine
) -> ReshardManager:
    cut = EngineLayout(config.rollout.tp, config.rollout.expert_parallel)
    job = Job(config.resources.ranks_per_node, getattr(torch, config.model.dtype), device())
    return ReshardManager(actor, engine, push_sides(shape, layout, cut), config.reshard, job)
