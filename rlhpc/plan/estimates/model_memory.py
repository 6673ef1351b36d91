"""Memory of each model of a run on one rank: weights, gradients, optimizer state, activations, and offload."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from rlhpc.checkpoint.formats.described import resolve_value_model
from rlhpc.config.algorithm import WITH_CRITIC
from rlhpc.config.model_settings import (
    ModelSettings,
    actor_settings,
    beside_engine,
    critic_settings,
    models_elsewhere,
    models_on,
    reference_settings,
    reward_model_settings,
)
from rlhpc.config.schema import RunConfig
from rlhpc.config.training import MemorySection, ParallelSection
from rlhpc.models import ModelDescription, ModelShape
from rlhpc.plan.estimates.activations import (
    ActivationSetting,
    head_workspace,
    in_flight_activations,
    offloaded_activations,
    stage_activations,
)
from rlhpc.plan.estimates.fsdp_activations import FsdpSetting, find_measured
from rlhpc.plan.estimates.fsdp_memory import FsdpModel, layout_sizes, make_fsdp_model
from rlhpc.plan.estimates.rank_memory import (
    LocalParameter,
    RankModel,
    StateBytes,
    Tokens,
    coordinates,
    default_bucket,
    rank_parameters,
    state_bytes,
)
from rlhpc.sharding.layout import ParallelLayout, make_layout
from rlhpc.sharding.placement import backend_for

_FLOAT32 = 4


@dataclass(frozen=True)
class MegatronModel(RankModel):
    """One model on one rank of Megatron's back end."""

    name: str
    setting: ActivationSetting
    rank: int
    state: StateBytes
    tokens: Tokens
    trained: bool

    @property
    def layout(self) -> ParallelLayout:
        return self.setting.layout

    @property
    def memory(self) -> MemorySection:
        return self.setting.memory

    @property
    def update_parts(self) -> dict[str, int]:
        return {"activations": self.stored, "workspace": self.workspace}

    @property
    def pass_parts(self) -> dict[str, int]:
        return {"activations": self.forward_peak}

    @property
    def stage(self) -> int:
        return coordinates(self.setting.layout, self.rank)["pp"]

    @property
    def stored(self) -> int:
        """Activations at the peak of an update, of all in-flight microbatches."""
        return in_flight_activations(self.setting, self.stage, self.tokens.trained, self.tokens.microbatches)

    @property
    def activations_on_cpu(self) -> int:
        if not self.trained:
            return 0
        return offloaded_activations(self.setting, self.stage, self.tokens.trained, self.tokens.microbatches)

    @property
    def workspace(self) -> int:
        """Temporary bytes of a backward pass: recomputed modules, and log-probs or the gradients of activations and of
        the largest weight."""
        kept, setting = stage_activations(self.setting, self.stage, self.tokens.trained), self.setting
        largest = max(p.numel for chunk in self.parameters for p in chunk) * setting.itemsize
        head = head_workspace(setting, self.stage, self.tokens.trained, backward=True)
        return kept.recomputed + max(head, largest + 2 * _forward_peak(setting, self.tokens.trained))

    @property
    def forward_peak(self) -> int:
        """Peak bytes of a forward pass without gradients: a layer's tensors, or those of log-probs."""
        head = head_workspace(self.setting, self.stage, self.tokens.passed, backward=False)
        return max(_forward_peak(self.setting, self.tokens.passed), head)

    @cached_property
    def parameters(self) -> list[list[LocalParameter]]:
        return rank_parameters(self.setting.shape, self.setting.layout, self.stage)

    @property
    def saved_on_cpu(self) -> int:
        """Master weights and moments, and the rank's share of the weights that data-parallel ranks have in common."""
        layout, state, itemsize = self.setting.layout, self.state, self.setting.itemsize
        optimizer = state.optimizer + state.cpu
        if itemsize == _FLOAT32:  # the weights, which are also the master weights, are saved twice
            optimizer += optimizer // 2
        sizes = [(p.numel, layout.edp if p.expert else layout.dp * layout.cp) for c in self.parameters for p in c]
        return optimizer + itemsize * sum(numel // ranks for numel, ranks in sizes)


def rank_models(config: RunConfig, shape: ModelDescription, layout: ParallelLayout, rank: int) -> list[RankModel]:
    """Returns the actor, then the other models of a rank that trains. Needs the config.json of a reward model and of a
    critic's own model."""
    train, rl = config.train, config.train.steps > 0
    passing = train.log_prob_tokens_per_microbatch or train.tokens_per_microbatch
    make = _Maker(config, rank, shape)
    actor = actor_settings(config)
    if not rl:  # in RL runs, a warm-up's state is as large, apart from its share in CPU memory
        actor = replace(actor, optimizer=config.sft.optimizer if config.sft else None)
    actor_model = make("actor", shape, layout, actor, (train.tokens_per_microbatch, passing))
    names = [name for name in ("reward model", "reference", "critic") if name not in models_elsewhere(config)]
    return [actor_model, *_beside(make, shape, layout.world_size, names)]


def judge_models(config: RunConfig, shape: ModelDescription, ranks: int, rank: int) -> list[RankModel]:
    """Returns the models of one of ``ranks`` ranks of judges."""
    return [*_beside(_Maker(config, rank, shape), shape, ranks, models_on(config, "judges"))]


def _beside(make: _Maker, shape: ModelDescription, ranks: int, names: Collection[str]) -> Iterator[RankModel]:
    """Yields those models of these names that the run has beside the actor, on ``ranks`` ranks."""
    config, train = make.config, make.config.train
    rl, passing = train.steps > 0, train.log_prob_tokens_per_microbatch or train.tokens_per_microbatch
    reward_model = config.reward_model
    if reward_model is not None and "reward model" in names and (rl or config.data.validation):
        own, settings = resolve_value_model(config, reward_model.model), reward_model_settings(config)
        tokens = reward_model.tokens_per_microbatch or passing
        cut = make_layout(settings.parallel, ranks)
        yield make("reward model", own, cut, settings, (tokens, tokens))
    if rl and "reference" in names and config.algorithm.kl.coefficient > 0:
        settings = reference_settings(config)
        yield make("reference", shape, make_layout(settings.parallel, ranks), settings, (passing, passing))
    if rl and "critic" in names and config.algorithm.name in WITH_CRITIC:
        critic, settings = config.critic, critic_settings(config)
        own = resolve_value_model(config, critic.path) if critic.path else shape.with_value_head
        tokens = critic.tokens_per_microbatch or train.tokens_per_microbatch
        yield make("critic", own, make_layout(settings.parallel, ranks), settings, (tokens, tokens))


def models_beside_engine(config: RunConfig, actor: ModelDescription, engines: int) -> list[RankModel]:
    """Returns the models that each of ``engines`` engines has beside it, on the first rank of one."""
    train, tp, found = config.train, config.rollout.tp, list[RankModel]()
    passing, make = train.log_prob_tokens_per_microbatch or train.tokens_per_microbatch, _Maker(config, 0, actor)

    def add(name: str, shape: ModelDescription, settings: ModelSettings, tokens: int) -> None:
        settings = settings_beside_engine(config, settings, actor, engines, experts=shape.experts is not None)
        layout = make_layout(settings.parallel, engines * tp)
        found.append(make(name, shape, layout, settings, (tokens, tokens)))

    model = config.reward_model
    if model is not None and config.reward_model_on == "engines":
        tokens = model.tokens_per_microbatch or passing
        add("reward model", resolve_value_model(config, model.model), reward_model_settings(config), tokens)
    if config.algorithm.kl.coefficient > 0 and config.reference_on == "engines":
        add("reference", actor, reference_settings(config), passing)
    return found


def model_folder(config: RunConfig, name: str) -> Path:
    """Returns the folder of one of the run's models."""
    if name == "critic" and config.critic.path is not None:
        return config.critic.path
    if name == "reward model" and config.reward_model is not None:
        return config.reward_model.model
    return config.model.path


def settings_beside_engine(
    config: RunConfig, settings: ModelSettings, actor: ModelDescription, engines: int, *, experts: bool
) -> ModelSettings:
    """Returns the settings of a model that the ranks of each engine share; ``experts``: it has some."""
    if backend_for(config, actor) == "fsdp":
        return replace(settings, parallel=ParallelSection(cp=config.rollout.tp, dp_replicate=engines))
    return beside_engine(settings, config.rollout.tp, experts=experts)


@dataclass(frozen=True)
class _Maker:
    """Makes models of a rank. ``actor``: decides the back end of all."""

    config: RunConfig
    rank: int
    actor: ModelDescription

    def __call__(
        self,
        name: str,
        shape: ModelDescription,
        layout: ParallelLayout,
        settings: ModelSettings,
        limits: tuple[int, int],
    ) -> RankModel:
        """``limits``: configured tokens of a microbatch in training and in forward passes."""
        tokens = _tokens(self.config, layout, *limits)
        if backend_for(self.config, self.actor) == "fsdp":
            return self._fsdp(name, shape, layout, settings, tokens)
        assert isinstance(shape, ModelShape), "megatron trains known families"
        return self._megatron(name, shape, layout, settings, tokens)

    def _megatron(
        self, name: str, shape: ModelShape, layout: ParallelLayout, settings: ModelSettings, tokens: Tokens
    ) -> MegatronModel:
        dtype, optimizer = self.config.model.dtype, settings.optimizer
        state = state_bytes(
            shape,
            layout,
            self.rank,
            dtype,
            optimizer_offload_fraction=optimizer.optimizer_offload_fraction if optimizer else None,
            bucket=default_bucket(layout),
        )
        in_float32 = shape.experts is not None and shape.experts.float32_router(settings.moe.router_dtype)
        setting = ActivationSetting(shape, layout, settings.parallel, settings.memory, dtype, float32_router=in_float32)
        return MegatronModel(name, setting, self.rank, state, tokens, optimizer is not None)

    def _fsdp(
        self, name: str, shape: ModelDescription, layout: ParallelLayout, settings: ModelSettings, tokens: Tokens
    ) -> FsdpModel:
        sizes = layout_sizes(settings.parallel, layout)
        dtype = self.config.model.dtype
        measured = None if isinstance(shape, ModelShape) else find_measured(model_folder(self.config, name), dtype)
        setting = FsdpSetting(shape, sizes.cp, settings.parallel, settings.memory, dtype, measured=measured)
        section = settings.optimizer
        optimizer = None if section is None else "adamw" if section.function is not None else section.name
        return make_fsdp_model(name, setting, sizes, self.rank, tokens, optimizer)


def _tokens(config: RunConfig, layout: ParallelLayout, trained: int, passed: int) -> Tokens:
    """Returns at least one sequence, and at most a rank's samples at full length."""
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    least = -(-longest // layout.cp)
    samples = config.train.prompts_per_step * config.rollout.samples_per_prompt
    own, minibatch = (-(-count // layout.dp) * least for count in (samples, samples // config.train.minibatches))
    trained, passed = max(trained, least), max(passed, least)
    if config.train.steps and config.sft is None:
        trained, passed = min(trained, max(minibatch, least)), min(passed, own)
    return Tokens(trained, passed, max(1, -(-minibatch // trained)))


def _forward_peak(setting: ActivationSetting, tokens: int) -> int:
    """Returns the bytes of the largest tensors of one layer: the residual, a projection's input and output."""
    shape, e, tp = setting.shape, setting.itemsize, setting.layout.tp
    ffn = shape.ffn_size / tp
    if shape.experts:
        taken = shape.experts.top_k * setting.layout.etp / setting.sequence_cut
        ffn = max(ffn, taken * (shape.experts.ffn_size / setting.layout.etp + shape.hidden_size))
    heads = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim / tp
    return int(
        e * tokens * (2 * shape.hidden_size / setting.sequence_cut + shape.hidden_size + max(4 * ffn, 2 * heads))
    )
