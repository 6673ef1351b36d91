"""The models that a run keeps on a rank: their weights, gradients and optimizer state, and what may leave the GPU."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from rlhpc.config.algorithm import WITH_CRITIC
from rlhpc.config.model_settings import (
    ModelSettings,
    actor_settings,
    critic_settings,
    reference_settings,
    reward_model_settings,
)
from rlhpc.config.schema import RunConfig
from rlhpc.models import ModelShape, value_shape
from rlhpc.plan.estimates.activations import ActivationSetting, in_flight_activations, stage_activations
from rlhpc.plan.estimates.optimizer_memory import (
    LocalParameter,
    StateBytes,
    coordinates,
    default_bucket,
    rank_parameters,
    state_bytes,
)
from rlhpc.sharding.layout import ParallelLayout, make_layout

_FLOAT32 = 4
_STATISTICS = 3 * _FLOAT32 << 26  # float32 copies of a chunk of logits, and what is made of them (log_probs.py)


@dataclass(frozen=True)
class Tokens:
    """Of one micro batch on a rank, with gradient and without; and of how many micro batches an update is made."""

    trained: int
    passed: int
    microbatches: int


@dataclass(frozen=True)
class RankModel:
    """A model as one rank keeps it."""

    name: str
    setting: ActivationSetting
    rank: int
    state: StateBytes
    tokens: Tokens
    trained: bool

    @cached_property
    def resting(self) -> StateBytes:
        """What stays on the GPU when it is offloaded as configured."""
        return self.left(keep_weights=False)

    def left(self, *, keep_weights: bool) -> StateBytes:
        """Kinds go as the back end lets them: gradients, optimizer, weights, as whole as their buffers are."""
        section, state = self.setting.memory.offload, self.state
        chosen = {
            "gradients": self.trained and section.gradients,
            "optimizer": self.trained and section.optimizer,
            "parameters": section.parameters,
        }
        sizes = {"gradients": state.gradients, "optimizer": state.optimizer, "parameters": state.parameters}
        wanted = section.fraction * sum(size for kind, size in sizes.items() if chosen[kind])
        gone = dict.fromkeys(sizes, 0)
        for kind, size in sizes.items():
            if chosen[kind] and wanted > 0:
                gone[kind] = min(size, int(wanted)) if kind == "optimizer" else size
                wanted -= gone[kind]
        if keep_weights:
            gone["parameters"] = 0
        master = max(0, state.master - gone["optimizer"])
        return StateBytes(
            state.parameters - gone["parameters"],
            state.gradients - gone["gradients"],
            master,
            state.optimizer - gone["optimizer"] - master,
            state.cpu,
            state.staging,
        )

    @property
    def stage(self) -> int:
        return coordinates(self.setting.layout, self.rank)["pp"]

    @property
    def kept(self) -> int:
        """Activations at the fullest moment of an update, with those of all micro batches under way."""
        return in_flight_activations(self.setting, self.stage, self.tokens.trained, self.tokens.microbatches)

    @property
    def workspace(self) -> int:
        """What is made and dropped in a backward pass: modules computed again, gradients of logits, of activations and
        of the largest weight."""
        kept, setting = stage_activations(self.setting, self.stage, self.tokens.trained), self.setting
        largest = max(p.numel for chunk in self.parameters for p in chunk) * setting.itemsize
        statistics = min(_STATISTICS, 3 * _FLOAT32 * kept.logits // setting.itemsize)
        return kept.recomputed + max(kept.logits + statistics, largest + 2 * _passing(setting, self.tokens.trained))

    @property
    def passing(self) -> int:
        """A pass without gradient: a layer's tensors, and at the end the logits."""
        logits = stage_activations(self.setting, self.stage, self.tokens.passed).logits
        statistics = min(_STATISTICS, 3 * _FLOAT32 * logits // self.setting.itemsize)
        return max(_passing(self.setting, self.tokens.passed), logits + statistics)

    @cached_property
    def parameters(self) -> list[list[LocalParameter]]:
        return rank_parameters(self.setting.shape, self.setting.layout, self.stage)

    @property
    def saved_on_cpu(self) -> int:
        """Copies that a checkpoint is written from: the rank's own master weights and moments, and its share of the
        weights that data-parallel ranks have alike."""
        layout, state, itemsize = self.setting.layout, self.state, self.setting.itemsize
        optimizer = state.optimizer + state.cpu
        if itemsize == _FLOAT32:  # the weights, which are their own master weights, are saved as such too
            optimizer += optimizer // 2
        sizes = [(p.numel, layout.edp if p.expert else layout.dp * layout.cp) for c in self.parameters for p in c]
        return optimizer + itemsize * sum(numel // ranks for numel, ranks in sizes)


def rank_models(config: RunConfig, shape: ModelShape, layout: ParallelLayout, rank: int) -> list[RankModel]:
    """The actor first, then those beside it. A reward model or critic of its own must be there to read."""
    train, rl = config.train, config.train.steps > 0
    passing = train.log_prob_tokens_per_microbatch or train.tokens_per_microbatch
    make = _Maker(config, rank)
    actor = actor_settings(config)
    if not rl:  # with both phases, a warm-up's state is as large, but for its share in CPU memory
        actor = replace(actor, optimizer=config.sft.optimizer if config.sft else None)
    models = [make("actor", shape, layout, actor, (train.tokens_per_microbatch, passing))]
    reward_model = config.reward_model
    if reward_model is not None and (rl or config.data.validation):
        own, settings = value_shape(reward_model.model), reward_model_settings(config)
        tokens = reward_model.tokens_per_microbatch or passing
        cut = make_layout(settings.parallel, layout.world_size)
        models.append(make("reward model", own, cut, settings, (tokens, tokens)))
    if rl and config.algorithm.kl.coefficient > 0:
        models.append(make("reference", shape, layout, reference_settings(config), (passing, passing)))
    if rl and config.algorithm.name in WITH_CRITIC:
        critic, settings = config.critic, critic_settings(config)
        own = value_shape(critic.path) if critic.path else shape.with_value_head
        tokens = critic.tokens_per_microbatch or train.tokens_per_microbatch
        cut = make_layout(settings.parallel, layout.world_size)
        models.append(make("critic", own, cut, settings, (tokens, tokens)))
    return models


@dataclass(frozen=True)
class _Maker:
    config: RunConfig
    rank: int

    def __call__(
        self, name: str, shape: ModelShape, layout: ParallelLayout, settings: ModelSettings, limits: tuple[int, int]
    ) -> RankModel:
        """``limits``: tokens of a microbatch with gradient and without, as configured."""
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
        tokens = _tokens(self.config, layout, *limits)
        return RankModel(name, setting, self.rank, state, tokens, optimizer is not None)


def _tokens(config: RunConfig, layout: ParallelLayout, trained: int, passed: int) -> Tokens:
    """Never less than one sequence, and no more than a rank's samples have when all are as long as they may be."""
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    least = -(-longest // layout.cp)
    samples = config.train.prompts_per_step * config.rollout.samples_per_prompt
    own, minibatch = (-(-count // layout.dp) * least for count in (samples, samples // config.train.minibatches))
    trained, passed = max(trained, least), max(passed, least)
    if config.train.steps and config.sft is None:
        trained, passed = min(trained, max(minibatch, least)), min(passed, own)
    return Tokens(trained, passed, max(1, -(-minibatch // trained)))


def _passing(setting: ActivationSetting, tokens: int) -> int:
    """The largest tensors of one layer at a time: the residual, what a projection takes and gives."""
    shape, e, tp = setting.shape, setting.itemsize, setting.layout.tp
    ffn = shape.ffn_size / tp
    if shape.experts:
        taken = shape.experts.top_k * setting.layout.etp / setting.sequence_cut
        ffn = max(ffn, taken * (shape.experts.ffn_size / setting.layout.etp + shape.hidden_size))
    heads = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim / tp
    return int(
        e * tokens * (2 * shape.hidden_size / setting.sequence_cut + shape.hidden_size + max(4 * ffn, 2 * heads))
    )
