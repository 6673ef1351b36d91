"""The composition root: the only place that asks which back end and which engine are configured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from rlhpc.algo import Algorithm, find_algorithm
from rlhpc.api import Completion, Prompt, RolloutEngine
from rlhpc.backends.megatron import MegatronBackend
from rlhpc.config.schema import OptimizerSection, RunConfig
from rlhpc.core.context import RankContext
from rlhpc.core.folder import RunFolder
from rlhpc.core.rank import RankInfo
from rlhpc.data.prompts import PromptSet
from rlhpc.data.rewards import load_reward
from rlhpc.data.sft import SFTSet
from rlhpc.data.tokenizer import Tokenizer
from rlhpc.models import ModelShape, read_model
from rlhpc.parallel.compat import device
from rlhpc.parallel.groups import build_groups
from rlhpc.plan.engine import EngineLayout
from rlhpc.plan.layout import ParallelLayout, make_layout
from rlhpc.plan.push import push_sides
from rlhpc.reshard import Job, ReshardManager
from rlhpc.rollout.vllm_engine import VllmEngine


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
    tokenizer = Tokenizer.load(config.model.path, shape.vocab_size, config.data.chat_template)
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
    prompts = PromptSet.load(config.data.train, config.data, tokenizer, "data.train") if rl else None
    validation = None
    if config.data.validation:
        validation = PromptSet.load(config.data.validation, config.data, tokenizer, "data.validation")
    sft = SFTSet.load(config.sft.data, tokenizer) if config.sft else None
    actor = model(config.sft.optimizer if config.sft else config.train.optimizer)
    reference = model(None) if rl and algorithm.needs_reference(config.algorithm) else None
    engine = _engine(config, shape, tokenizer) if rl or validation else None
    return Run(
        config=config,
        context=context,
        layout=layout,
        shape=shape,
        tokenizer=tokenizer,
        actor=actor,
        reference=reference,
        engine=engine,
        weights=_manager(config, shape, layout, actor, engine) if engine is not None else None,
        algorithm=algorithm,
        score=lambda prompt, completion: reward(prompt, tokenizer.decode(completion.tokens)),
        prompts=prompts,
        validation=validation,
        sft=sft,
    )


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
