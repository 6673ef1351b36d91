"""Predicts a run's GPU memory phase by phase from config and model shape; with CPU memory from ``cpu_memory.py``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, floor
from typing import Literal

from rlhpc.config.model_settings import actor_settings, critic_settings
from rlhpc.config.rollout import DEFAULT_SEQUENCES, GRAPH_STRIDE, RolloutSection
from rlhpc.config.schema import RunConfig
from rlhpc.models import ModelDescription
from rlhpc.plan.estimates.cpu_memory import CpuMemory, cpu_memory
from rlhpc.plan.estimates.engine_weights import draft_kv_elements, draft_weights, engine_numel
from rlhpc.plan.estimates.fsdp_memory import Accumulation, resolve_accumulation
from rlhpc.plan.estimates.fsdp_parameters import is_plannable
from rlhpc.plan.estimates.hardware import Reserves, named_gpu, read_site
from rlhpc.plan.estimates.model_memory import judge_models, models_beside_engine, rank_models
from rlhpc.plan.estimates.rank_memory import ITEMSIZE, RankModel, StateBytes
from rlhpc.plan.estimates.workload import step_workload
from rlhpc.sharding.engine_shards import EngineLayout
from rlhpc.sharding.layout import ParallelLayout
from rlhpc.sharding.placement import RoleName, engine_ranks, generating_ranks, judge_ranks, placement_of

Parts = dict[str, int]


@dataclass(frozen=True)
class PhaseMemory:
    """Bytes on the GPU at the peak of a phase, by purpose."""

    name: str
    parts: dict[str, int]
    role: RoleName = "all"

    @property
    def total(self) -> int:
        return sum(self.parts.values())


def states_parts(models: Sequence[RankModel], states: Sequence[StateBytes]) -> Parts:
    """Returns bytes by kind, prefixed with the model's name except for the actor."""
    parts: Parts = {}
    for model, state in zip(models, states, strict=True):
        sizes = {"weights": state.parameters, "gradients": state.gradients, "optimizer": state.optimizer}
        for kind, size in sizes.items():
            parts[kind if model.name == "actor" else f"{model.name}: {kind}"] = size
    return parts


def make_phase(name: str, parts: Parts) -> PhaseMemory:
    return PhaseMemory(name, {what: size for what, size in parts.items() if size})


def largest_moment(name: str, moments: Sequence[Parts]) -> PhaseMemory:
    return max((make_phase(name, moment) for moment in moments), key=lambda phase: phase.total)


def update_phases(model: RankModel, models: Sequence[RankModel], asleep: Parts) -> list[PhaseMemory]:
    """The critic's update is first: the actor's weights are on the device then, its other state is offloaded."""
    states = []
    for other in models:
        if other is model:
            states.append(other.updating_state)
        else:
            states.append(other.remaining(keep_weights=True) if other.name == "actor" else other.idle_state)
    parts = {**states_parts(models, states), **asleep}
    prefix = "" if model.name == "actor" else f"{model.name} "
    passes = {**parts, **model.update_parts}
    return [make_phase(f"{prefix}forward and backward", passes), make_phase(f"{prefix}optimizer step", parts)]


def scoring_parts(model: RankModel, models: Sequence[RankModel]) -> Parts:
    """Returns parts of a frozen model beside an engine while it scores, and of the others there."""
    states = [other.remaining(keep_weights=True) if other is model else other.idle_state for other in models]
    return {**states_parts(models, states), **model.pass_parts}


def judge_phases(config: RunConfig, shape: ModelDescription) -> tuple[int, list[PhaseMemory], list[RankModel]]:
    """Returns the rank of judges, by its number among them, that needs most memory, its phases and its models."""
    ranks = judge_ranks(config)
    stages = {
        stage * (ranks // model.layout.pp)
        for model in judge_models(config, shape, ranks, 0)
        for stage in range(model.layout.pp)
    }
    if not stages:  # the critic of an algorithm of the user's own, which is not predicted on trainers either
        return 0, [], []
    found = [(rank, judge_models(config, shape, ranks, rank)) for rank in sorted(stages)]
    plans = [(rank, _judge_phases(models), models) for rank, models in found]
    return max(plans, key=lambda plan: max(phase.total for phase in plan[1]))


def _judge_phases(models: Sequence[RankModel]) -> list[PhaseMemory]:
    """Models load one after the other; each evaluates while the others are offloaded as configured."""
    resting = [model.idle_state for model in models]
    moments, loads = [], []
    for number, model in enumerate(models):
        loads.append({**states_parts(models[:number], resting[:number]), **states_parts([model], [model.state])})
        states = [other.remaining(keep_weights=True) if other is model else other.idle_state for other in models]
        moments.append({**states_parts(models, states), **model.pass_parts})
    phases = [largest_moment("judges: load", loads), largest_moment("judges: passes", moments)]
    for model in models:
        if model.trained:
            phases += [replace(phase, name=f"judges: {phase.name}") for phase in update_phases(model, models, {})]
            saved = replace(model.state, gradients=model.idle_state.gradients)
            states = [saved if other is model else other.idle_state for other in models]
            phases.append(make_phase("judges: save", states_parts(models, states)))
    return [replace(phase, role="judges") for phase in phases]


GIB = 1 << 30
ENGINE_TOKENS = 8192  # at most in one forward pass of vLLM (max_num_batched_tokens)
MOST_SEQUENCES = 1024  # vLLM's own default on GPUs of 70 GiB (engine/arg_utils.py, get_batch_defaults)
USABLE = 0.95  # fraction of a GPU: allocator fragmentation is not predicted, other memory only to a few percent
_SAMPLING = 8  # bytes per entry of a sequence's logits in sampling
_ENGINE = ("engine weights", "KV cache", "engine's passes")
_ESTIMATES = Reserves()  # for a machine without measurements


@dataclass(frozen=True)
class MemoryPlan:
    """Memory of one rank; with placement separate or lend, of one that trains, of one that generates and of a judge.
    ``gpu_bytes``: of the GPU, None where it is not known."""

    rank: int
    phases: tuple[PhaseMemory, ...]
    cpu: CpuMemory
    gpu_bytes: int | None = None
    reserves: Reserves = _ESTIMATES
    engine_rank: int | None = None  # that generates, with placement separate
    judge_rank: int | None = None  # with models beside the actor, if they have ranks of their own

    @property
    def peak(self) -> int:
        return max(phase.total for phase in self.phases)

    @property
    def by_rank(self) -> dict[int, tuple[PhaseMemory, ...]]:
        """Phases of each of its ranks."""
        ranks = dict.fromkeys(map(self.rank_of, self.phases))
        return {rank: tuple(phase for phase in self.phases if self.rank_of(phase) == rank) for rank in ranks}

    def rank_of(self, phase: PhaseMemory) -> int:
        """Returns the rank that the phase is of."""
        of_role = {"engines": self.engine_rank, "judges": self.judge_rank}.get(phase.role)
        return self.rank if of_role is None else of_role

    @property
    def first_too_large(self) -> PhaseMemory | None:
        """First phase that does not fit into the GPU."""
        if self.gpu_bytes is None:
            return None
        return next((phase for phase in self.phases if phase.total > self.gpu_bytes), None)

    @property
    def refused_engine(self) -> tuple[int, int] | None:
        """(bytes that the engine needs, free bytes beside the trainer), if the models load and it cannot wake."""
        first, rollout = self.first_too_large, next((phase for phase in self.phases if phase.name == "rollout"), None)
        if first is None or rollout is None or self.gpu_bytes is None or rollout.total <= self.gpu_bytes:
            return None
        if first.name == "load" and _ENGINE[0] not in first.parts:
            return None
        needed = sum(rollout.parts.get(part, 0) for part in _ENGINE)
        return needed, self.gpu_bytes - (rollout.total - needed)


def predict_memory(
    config: RunConfig,
    shape: ModelDescription,
    layout: ParallelLayout,
    gpu_gib: float | None = None,
    reserves: Reserves = _ESTIMATES,
) -> MemoryPlan:
    """Returns the plan of the rank that needs most memory. Without ``gpu_gib``, the KV cache holds one full batch."""
    each = layout.world_size // layout.pp
    device = Device(gpu_gib, reserves)
    config = with_planned_accumulation(config, shape, layout, device)
    plans = [rank_memory(config, shape, layout, stage * each, device) for stage in _different(shape, layout)]
    return max(plans, key=lambda plan: max(phase.total for phase in plan.by_rank[plan.rank]))


def with_planned_accumulation(
    config: RunConfig, shape: ModelDescription, layout: ParallelLayout, device: Device
) -> RunConfig:
    """Returns the config with ``memory.accumulation: auto`` replaced: keep where the GPU is known to hold it."""

    def fits(tried: RunConfig) -> bool:
        return device.size is not None and rank_memory(tried, shape, layout, 0, device).peak <= USABLE * device.size

    return resolve_accumulation(config, shape, fits)


@dataclass(frozen=True)
class Device:
    """GiB of a GPU, None where it is not known, and what is reserved of them."""

    gib: float | None = None
    reserves: Reserves = _ESTIMATES

    @property
    def size(self) -> int | None:
        """In bytes."""
        return None if self.gib is None else int(self.gib * GIB)


def rank_memory(
    config: RunConfig, shape: ModelDescription, layout: ParallelLayout, rank: int, device: Device = Device()
) -> MemoryPlan:
    """Returns the plan of one rank."""
    models, engine = rank_models(config, shape, layout, rank), _engine(config, shape, device.size)
    placement = placement_of(config, layout.world_size + judge_ranks(config) + (engine_ranks(config) or 0))
    beside = None if placement.separate and not placement.lends else engine
    asleep = {"engine, asleep": device.reserves.sleeping_engine} if beside is not None else {}
    phases = [_load(models, beside, asleep)]
    if beside is not None:
        phases += [_weight_sync(config, models, beside), _rollout(models, beside)]
    elif placement.separate:
        phases.append(make_phase("weight sync", {**_models_in_sync(models), **_buckets(config, 2)}))
    if config.train.steps > 0:
        phases += _passes(models, asleep)
    for model in reversed([model for model in models if model.trained]):
        phases += update_phases(model, models, asleep)
    if models[0].trained:
        phases.append(_save(models, asleep))
    scoring = models_beside_engine(config, shape, placement.num_engines) if placement.separate else []
    judge_rank, judged = None, list[RankModel]()
    if placement.judges is not None:
        number, judging, judged = judge_phases(config, shape)
        phases += judging
        judge_rank = placement.judges.first + number
    if placement.separate and engine is not None:
        beside_it = largest_moment("rollout", [scoring_parts(model, scoring) for model in scoring] or [{}]).parts
        phases.append(PhaseMemory("rollout", {**_awake(engine), **beside_it, **_buckets(config, 2)}, "engines"))
    phases = [replace(phase, parts={**phase.parts, "libraries": device.reserves.context}) for phase in phases]
    cpu = cpu_memory(config, (models, judged, scoring), shape, placement, engine.weights if engine is not None else 0)
    first_engine = placement.engines.first if placement.separate else None
    return MemoryPlan(rank, tuple(phases), cpu, device.size, device.reserves, first_engine, judge_rank)


def _engine(config: RunConfig, shape: ModelDescription, gpu_bytes: int | None) -> EngineMemory | None:
    """Returns None where nothing is generated."""
    if not config.train.steps and not config.data.validation:
        return None
    return engine_memory(config, shape, gpu_bytes)


@dataclass(frozen=True)
class EngineMemory:
    """Bytes of one rank of an engine. ``token``: of the KV cache per token."""

    weights: int
    working: int  # of a forward pass
    cache: int
    token: int
    claimed: int  # must be free on the GPU when the engine starts

    @property
    def tokens(self) -> int:
        """Number of tokens that the cache holds."""
        return self.cache // self.token

    def smallest(self, sequence: int) -> int:
        """Returns the bytes of an engine whose cache holds one sequence of ``sequence`` tokens."""
        return self.weights + self.working + sequence * self.token

    def fitting_setting(
        self, section: RolloutSection, claimed: int, free: int, total: int, sequence: int
    ) -> tuple[str, float, bool]:
        """Returns the key in ``rollout`` that sets the claim, its largest value for ``free`` bytes, and whether
        the cache then holds a sequence. ``claimed`` of the GPU's ``total`` bytes are configured."""
        if section.kv_cache_gib is None:
            share = floor(100 * free / total) / 100
            return "gpu_memory_utilization", share, share * total >= self.smallest(sequence)
        cache = floor(100 * (free - claimed + self.cache) / GIB) / 100
        return "kv_cache_gib", cache, cache * GIB >= sequence * self.token


def engine_memory(config: RunConfig, shape: ModelDescription, gpu_bytes: int | None) -> EngineMemory:
    """Returns the memory of the configured engines; without a known GPU, with a cache for one full batch."""
    section = engine_section(config, shape, gpu_bytes)
    return engine_bytes(section, shape, config.model.dtype, gpu_bytes, section.sequences * sequence_tokens(config))


def engine_section(config: RunConfig, shape: ModelDescription, gpu_bytes: int | None) -> RolloutSection:
    """Returns ``config.rollout`` with ``max_num_seqs``: set, or as many sequences of the expected length as the cache
    of a GPU with ``gpu_bytes`` holds, within bounds."""
    section = config.rollout
    if section.max_num_seqs is not None:
        return section
    number = DEFAULT_SEQUENCES
    if section.kv_cache_gib is not None or gpu_bytes is not None:
        held = _held_sequences(config, shape, gpu_bytes)
        number = min(max(number, held - held % GRAPH_STRIDE), MOST_SEQUENCES)
    return section.model_copy(update={"max_num_seqs": min(number, _most_at_once(config))})


def _held_sequences(config: RunConfig, shape: ModelDescription, gpu_bytes: int | None) -> int:
    """Returns how many sequences of the expected length the cache holds, less the memory that each takes to sample."""
    work, one = step_workload(config), config.rollout.model_copy(update={"max_num_seqs": 1})
    engine = engine_bytes(one, shape, config.model.dtype, gpu_bytes)
    shared = work.group if one.prefix_caching else 1
    each = engine.token * (work.prompt / shared + work.response)
    sampling = _SAMPLING * shape.vocab_size if one.kv_cache_gib is None else 0
    return int((engine.cache + sampling) / (each + sampling))


def _most_at_once(config: RunConfig) -> int:
    """Returns the most sequences that an engine may have: a step's samples, of all steps in flight if it runs beside
    the trainers. A validation of unknown size may have more."""
    train, section = config.train, config.rollout
    if not train.steps:
        return MOST_SEQUENCES
    ahead = 1 + config.asynchrony.max_staleness if engine_ranks(config) is not None else 1
    groups = ahead * train.prompts_per_step
    if train.dynamic_sampling is not None:
        groups = ceil(groups * train.dynamic_sampling.oversample)
    fewest = config.slurm.least_nodes * config.resources.ranks_per_node
    engines = max(1, generating_ranks(config, fewest) // section.tp)
    samples = ceil(groups / engines) * section.samples_per_prompt
    return max(samples, DEFAULT_SEQUENCES) if config.data.validation else samples


def engine_bytes(
    section: RolloutSection, shape: ModelDescription, dtype: str, gpu_bytes: int | None, tokens: int = 0
) -> EngineMemory:
    """Returns the memory of an engine's rank. The cache is ``rollout.kv_cache_gib``, what ``gpu_memory_utilization``
    leaves, or for ``tokens`` tokens without a known GPU. It is negative if there is no room for it."""
    e = ITEMSIZE[dtype]
    layout = EngineLayout(section.tp, section.expert_parallel)
    weights = e * engine_numel(shape, layout) + draft_weights(section, shape, dtype)
    # What guesses has keys and values of its own, in blocks of the same cache.
    token = kv_bytes_per_token(shape, section.tp, dtype) + e * draft_kv_elements(section, shape)
    ffn = (shape.ffn_size or 4 * shape.hidden_size) // section.tp
    if shape.experts:
        ffn = max(ffn, shape.experts.top_k * shape.experts.ffn_size // layout.etp // layout.ep)
    working = e * ENGINE_TOKENS * (4 * shape.hidden_size + 3 * ffn) + _SAMPLING * section.sequences * shape.vocab_size
    claimed = 0 if gpu_bytes is None else int(section.gpu_memory_utilization * gpu_bytes)
    if section.kv_cache_gib is not None:
        cache = int(section.kv_cache_gib * GIB)
        claimed = weights + working + cache
    elif gpu_bytes is None:
        cache = token * tokens
    else:
        cache = claimed - weights - working
    return EngineMemory(weights, working, cache, token, claimed)


def kv_bytes_per_token(shape: ModelDescription, tp: int, dtype: str) -> int:
    """Returns bytes on one rank of an engine. Latent attention stores one vector for all heads, on every rank."""
    latent = shape.latent
    if latent is not None:
        return ITEMSIZE[dtype] * shape.num_layers * (latent.kv_rank + latent.rope_dim)
    return ITEMSIZE[dtype] * shape.num_layers * 2 * max(1, shape.num_kv_heads // tp) * shape.head_dim


def sequence_tokens(config: RunConfig) -> int:
    """Returns the tokens of the longest prompt with the longest response."""
    return config.data.max_prompt_tokens + config.rollout.max_response_tokens


def _different(shape: ModelDescription, layout: ParallelLayout) -> list[int]:
    """Returns the stages that may need most memory: of stages with equal layers, the first has most in flight."""
    experts = set(shape.experts.layers) if shape.experts else set()
    counts = [[0, 0] for _ in range(layout.pp)]
    for layer, (stage, _, _) in enumerate(layout.layer_places(shape.num_layers)):
        counts[stage][layer in experts] += 1
    first = {tuple(count): stage for stage, count in reversed(list(enumerate(counts)))}
    return sorted({0, layout.pp - 1, min(1, layout.pp - 1), *first.values()})


def _load(models: Sequence[RankModel], engine: EngineMemory | None, asleep: Parts) -> PhaseMemory:
    """The engine starts first, and sleeps while the models load one after the other, each offloaded before the next."""
    resting = [model.idle_state for model in models]
    moments = [
        {**states_parts(models[:number], resting[:number]), **states_parts([model], [model.state]), **asleep}
        for number, model in enumerate(models)
    ]
    return largest_moment("load", [*([_awake(engine)] if engine is not None else []), *moments])


def _awake(engine: EngineMemory) -> Parts:
    """The engine's parts. vLLM refuses to start unless they are free (v1/worker/utils.py, request_memory)."""
    return dict(zip(_ENGINE, (engine.weights, max(0, engine.cache), engine.working), strict=True))


def _weight_sync(config: RunConfig, models: Sequence[RankModel], engine: EngineMemory) -> PhaseMemory:
    """Holds the weights of both sides, two buckets to send and two to receive."""
    parts = {**_models_in_sync(models), "engine weights": engine.weights}
    return make_phase("weight sync", {**parts, **(_buckets(config, 4) if config.reshard.method == "direct" else {})})


def _models_in_sync(models: Sequence[RankModel]) -> Parts:
    """The actor's weights, and what offload leaves of all else."""
    return states_parts(models, [models[0].remaining(keep_weights=True), *(model.idle_state for model in models[1:])])


def _buckets(config: RunConfig, count: int) -> Parts:
    return {"buckets": count * (config.reshard.bucket_mib << 20)}


def _rollout(models: Sequence[RankModel], engine: EngineMemory) -> PhaseMemory:
    return make_phase("rollout", {**states_parts(models, [model.idle_state for model in models]), **_awake(engine)})


def _passes(models: Sequence[RankModel], asleep: Parts) -> list[PhaseMemory]:
    """Log-probs and values, one model after the other; the actor's weights return first and stay."""
    found = []
    actor, others = models[0], models[1:]
    moments = []
    for model in models:
        states = [actor.idle_state if model.name == "reward model" else actor.remaining(keep_weights=True)]
        for other in others:
            states.append(other.remaining(keep_weights=True) if other is model else other.idle_state)
        moment = {**states_parts(models, states), **model.pass_parts, **asleep}
        if model.name == "reward model":
            found.append(make_phase("reward model", moment))
        else:
            moments.append(moment)
    return [*found, largest_moment("log-probs", moments)]


def _save(models: Sequence[RankModel], asleep: Parts) -> PhaseMemory:
    """The actor is complete after its update; a critic returns, without released gradients."""
    moments = []
    for model in models:
        if not model.trained:
            continue
        states = []
        for other in models:
            if other.name == "actor":
                states.append(other.state)
            elif other is model:
                states.append(replace(other.state, gradients=other.idle_state.gradients))
            else:
                states.append(other.idle_state)
        moments.append({**states_parts(models, states), **asleep})
    return largest_moment("save", moments)


def chosen_accumulation(
    config: RunConfig, shape: ModelDescription, layout: ParallelLayout, name: Literal["actor", "critic"] = "actor"
) -> Accumulation:
    """Returns ``memory.accumulation`` of a trained model: as configured; for auto keep, which reduces once an update,
    if every phase fits beside the whole gradients. Depends on the config and the model alone, so that all ranks and
    attempts choose alike: without a GPU named there it is reduce.

    ``layout``: of the ranks that train.
    """
    planned = with_accumulation_of(config, shape, layout)
    settings = actor_settings(planned) if name == "actor" else critic_settings(planned)
    found = settings.memory.accumulation
    return "reduce" if found == "auto" else found


def with_accumulation_of(config: RunConfig, shape: ModelDescription, layout: ParallelLayout) -> RunConfig:
    """Returns the config with what is chosen for each trained model in place of auto, if its back end is FSDP2."""
    if not is_plannable(shape):
        return config
    gpu = named_gpu(config, read_site(config))
    device = Device(gpu.memory_gib, gpu.reserves) if gpu is not None else Device()
    return with_planned_accumulation(config, shape, layout, device)
