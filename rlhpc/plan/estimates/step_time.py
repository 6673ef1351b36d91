"""Seconds of one RL step on a named GPU from config, model shape and mean lengths, and the schedule's constants."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rlhpc.checkpoint.formats.described import resolve_value_model
from rlhpc.config.model_settings import (
    ModelSettings,
    critic_settings,
    models_elsewhere,
    models_on,
    reference_settings,
    reward_model_settings,
)
from rlhpc.config.rollout import CostsSection
from rlhpc.config.schema import RunConfig
from rlhpc.config.site import EfficiencySection
from rlhpc.config.training import MemorySection, OptimizerSection, ParallelSection
from rlhpc.models import ModelDescription
from rlhpc.models.flops import forward_terms
from rlhpc.plan.estimates.fsdp_time import make_training
from rlhpc.plan.estimates.hardware import Gpu
from rlhpc.plan.estimates.memory import Device, engine_section, with_planned_accumulation
from rlhpc.plan.estimates.model_memory import settings_beside_engine
from rlhpc.plan.estimates.rollout_time import Engines, decoding_step, prompts_time, rollout_time, weight_sync_time
from rlhpc.plan.estimates.roofline import MachineSpeed, PhaseTime, times, total
from rlhpc.plan.estimates.separate import (
    SeparateStep,
    StagedSync,
    full_slots,
    mean_context,
    separate_step,
    staged_sync,
    sync_phase,
)
from rlhpc.plan.estimates.train_time import Training
from rlhpc.plan.estimates.workload import StepWorkload, step_workload
from rlhpc.sharding.layout import ParallelLayout, make_layout
from rlhpc.sharding.placement import (
    engine_ranks,
    generating_ranks,
    judge_ranks,
    placement_of,
    ranks_with,
    receiving_together,
)

SCORING = "scoring"  # by models beside engines


@dataclass(frozen=True)
class StepTime:
    """Phases of a step in order. ``engine_fits``: the cache holds at least one response. ``sides``: with placement
    separate, where generation and training are at once."""

    phases: tuple[PhaseTime, ...]
    work: StepWorkload
    ranks: int
    peak: float  # operations per second of one GPU
    training_flops: float
    engine_ranks: int = 0  # that only generate
    judge_ranks: int = 0  # of models beside the actor, if they have ranks of their own
    judging: float = 0.0  # seconds that these work
    engine_fits: bool = True
    sides: SeparateStep | None = None
    sync: StagedSync | None = None

    @property
    def seconds(self) -> float:
        return self.sides.seconds if self.sides is not None else sum(phase.seconds for phase in self.phases)

    @property
    def training_ranks(self) -> int:
        """Number of ranks that train."""
        return self.ranks - self.engine_ranks - self.judge_ranks

    @property
    def tokens_per_second(self) -> float:
        return self.work.tokens / self.seconds

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization of the actor's updates, as usually reported."""
        return self.training_flops / (self.phase("update").seconds * self.training_ranks * self.peak)

    @property
    def limit(self) -> str:
        """Largest bottleneck of the step; with placement separate of the side that has more work."""
        phases: Sequence[PhaseTime] = self.phases
        if self.sides is not None:
            generates = self.sides.engines > self.sides.trainers
            phases = [phase for phase in phases if (phase.name in ("rollout", SCORING)) == generates]
        parts = total(*(phase.parts for phase in phases))
        return max(parts, key=lambda part: parts[part])

    def phase(self, name: str) -> PhaseTime:
        """Returns the phase of that name; an empty one if the step has none."""
        return next((phase for phase in self.phases if phase.name == name), PhaseTime(name, {}))

    def share(self, name: str) -> float:
        """Returns the phase's share of the step's time."""
        return self.phase(name).seconds / self.seconds


def predict_step(
    config: RunConfig,
    shape: ModelDescription,
    layout: ParallelLayout,
    gpu: Gpu,
    efficiency: EfficiencySection,
    generating: PhaseTime | None = None,
) -> StepTime:
    """Returns the time of an RL step of ``config`` under ``layout``, without reward functions and waits for tools.

    ``generating``: an earlier result of predict_rollout for the same engines.
    """
    machine = MachineSpeed(gpu, efficiency, config.resources.ranks_per_node)
    return predict_step_on(config, shape, layout, machine, generating)


def predict_step_on(
    config: RunConfig,
    shape: ModelDescription,
    layout: ParallelLayout,
    machine: MachineSpeed,
    generating: PhaseTime | None = None,
) -> StepTime:
    """Returns the same on a machine of given speed."""
    config = with_planned_accumulation(config, shape, layout, Device(machine.gpu.memory_gib, machine.gpu.reserves))
    work, training = step_workload(config), make_training(config, shape, layout, config.actor.parallel, machine)
    ranks = generating_ranks(config, layout.world_size)
    engines = Engines(
        shape, engine_section(config, shape, machine.gpu.memory_bytes), machine, ranks, config.model.dtype
    )
    generating = generating or rollout_time(engines, work)
    updating = list(_training_phases(config, training, work))
    judged = judge_phases(config, training, work)
    if (waiting := waiting_for_judges(judged, updating)) is not None:
        updating.append(waiting)
    of_token, of_pair = forward_terms(shape)
    flops = 3 * work.tokens * work.epochs * (of_token + of_pair * work.pairs)
    apart, judges, sync, sides = engine_ranks(config) or 0, judge_ranks(config), None, None
    scoring = _scoring(config, training, work, apart)
    if not apart:
        first = weight_sync_time(engines, layout, config.reshard.method, training.shards)
    else:
        sync = staged_sync(engines, layout, receiving_together(config))
        first, spent = sync_phase(sync), sum(phase.seconds for phase in updating)
        if generating is not None:
            seconds = generating.seconds, spent
            sides = separate_step(engines, work, config.asynchrony, sync, seconds, scoring.seconds if scoring else 0.0)
            if config.placement == "lend":
                helping = Engines(
                    shape,
                    engine_section(config, shape, machine.gpu.memory_bytes),
                    machine,
                    layout.world_size,
                    config.model.dtype,
                )
                overhead = weight_sync_time(helping, layout, config.reshard.method, training.shards).seconds
                sides = replace(sides, lenders=helping.count / engines.count, lend_overhead=overhead)
    phases = (first, *(phase for phase in (generating, scoring) if phase), *updating)
    step = StepTime(phases, work, layout.world_size + apart + judges, machine.peak, flops, apart)
    judging = sum(phase.seconds for phase in judged)
    fits = generating is not None
    return replace(step, judge_ranks=judges, judging=judging, engine_fits=fits, sides=sides, sync=sync)


def predict_rollout(
    config: RunConfig, shape: ModelDescription, ranks: int, gpu: Gpu, efficiency: EfficiencySection
) -> PhaseTime | None:
    """Returns the time of a step's responses on ``ranks`` ranks; None if the engines' cache does not hold one."""
    machine = MachineSpeed(gpu, efficiency, config.resources.ranks_per_node)
    engines = Engines(shape, engine_section(config, shape, gpu.memory_bytes), machine, ranks, config.model.dtype)
    return rollout_time(engines, step_workload(config))


def predict_validation(
    config: RunConfig,
    shape: ModelDescription,
    layout: ParallelLayout,
    gpu: Gpu,
    efficiency: EfficiencySection,
    prompts: int,
) -> list[PhaseTime]:
    """Returns the phases of one validation on ``prompts`` prompts, without reward functions."""
    machine = MachineSpeed(gpu, efficiency, config.resources.ranks_per_node)
    ranks = generating_ranks(config, layout.world_size)
    engines = Engines(shape, engine_section(config, shape, gpu.memory_bytes), machine, ranks, config.model.dtype)
    each = config.validation.samples_per_prompt
    work = replace(step_workload(config), samples=prompts * each, generated=prompts * each, group=each)
    generating = rollout_time(engines, work)
    separate = engine_ranks(config) is not None
    training = make_training(config, shape, layout, config.actor.parallel, machine)
    first = [] if separate else [weight_sync_time(engines, layout, config.reshard.method, training.shards)]
    phases = [*first, *([generating] if generating else [])]
    reward_model = _reward_model(config, training)
    if config.reward_model_on == "engines":
        scoring = _scoring(config, training, replace(work, reference_pass=False), ranks)
        phases += [scoring] if scoring is not None else []
    elif config.reward_model is not None and reward_model is not None:
        tokens = config.reward_model.tokens_per_microbatch or config.train.tokens_per_microbatch
        phases.append(reward_model.pass_time(work, tokens, "reward model"))
    return phases


def _training_phases(config: RunConfig, training: Training, work: StepWorkload) -> Iterator[PhaseTime]:
    """Yields the phases of ranks that train."""
    train, actor, elsewhere = config.train, config.actor, models_elsewhere(config)
    passing = train.log_prob_tokens_per_microbatch or train.tokens_per_microbatch
    reward_model = _reward_model(config, training) if "reward model" not in elsewhere else None
    critic = _critic(config, training) if work.critic and "critic" not in elsewhere else None
    moving = _offload(config, training, reward_model, critic)
    if moving is not None:
        yield moving
    others = [name for name in ("reward model", "reference", "critic") if name not in elsewhere]
    beside = list(_phases_beside(config, training, work, others))
    yield from (phase for phase in beside if phase.name == "reward model")
    if work.policy_pass:
        yield training.pass_time(work, passing, "log-probs")
    yield from (phase for phase in beside if phase.name != "reward model")
    yield training.update_time(work, train.tokens_per_microbatch, actor.optimizer, actor.memory, "update")


def judge_phases(config: RunConfig, training: Training, work: StepWorkload) -> list[PhaseTime]:
    """Returns the phases of judges; none without any. ``training``: the actor's."""
    return [*_phases_beside(config, training, work, models_on(config, "judges"))]


def _phases_beside(
    config: RunConfig, training: Training, work: StepWorkload, names: Collection[str]
) -> Iterator[PhaseTime]:
    """Yields the phases of those models of these names that the run has beside the actor."""
    train = config.train
    passing = train.log_prob_tokens_per_microbatch or train.tokens_per_microbatch
    reward_model = _reward_model(config, training) if "reward model" in names else None
    if config.reward_model is not None and reward_model is not None:
        yield reward_model.pass_time(work, config.reward_model.tokens_per_microbatch or passing, "reward model")
    if work.reference_pass and "reference" in names:
        yield _reference(config, training).pass_time(work, passing, "reference")
    if work.critic and "critic" in names:
        critic, settings = _critic(config, training), critic_settings(config)
        tokens = config.critic.tokens_per_microbatch or train.tokens_per_microbatch
        yield critic.pass_time(work, tokens, "values")
        yield critic.update_time(work, tokens, config.critic.optimizer, settings.memory, "critic update")


_BESIDE = (  # phases of judges, and that of trainers beside which they are
    (("reward model",), None),
    (("reference", "values"), "log-probs"),
    (("critic update",), "update"),
)


def waiting_for_judges(judged: Sequence[PhaseTime], own: Sequence[PhaseTime]) -> PhaseTime | None:
    """Returns the seconds that trainers wait: scores come first; other passes run beside the actor's, and updates of
    the critic beside the actor's. None without judges."""
    if not judged:
        return None
    found: dict[str, float] = {}
    for theirs, ours in _BESIDE:
        beside = sum(phase.seconds for phase in own if phase.name == ours)
        phases = [phase.parts for phase in judged if phase.name in theirs]
        seconds = sum(total(*phases).values())
        if seconds > beside:
            found = total(found, times(total(*phases), (seconds - beside) / seconds))
    return PhaseTime("wait for judges", found)


def _scoring(config: RunConfig, training: Training, work: StepWorkload, ranks: int) -> PhaseTime | None:
    """Returns the time of the passes of models beside engines on ``ranks`` ranks; None without any. Offloaded weights
    return for every group: hardly ever do two of an engine finish at once."""
    train, found = config.train, list[PhaseTime]()
    passing = train.log_prob_tokens_per_microbatch or train.tokens_per_microbatch

    def add(name: str, shape: ModelDescription, settings: ModelSettings, tokens: int) -> None:
        parallel = settings_beside_engine(
            config, settings, training.shape, ranks // config.rollout.tp, experts=shape.experts is not None
        ).parallel
        model = replace(training, shape=shape, layout=make_layout(parallel, ranks), parallel=parallel)
        found.append(model.pass_time(work, tokens, name))
        if settings.memory.offload.parameters:
            groups = work.samples / work.group / (ranks // config.rollout.tp)
            size = groups * model.frozen_bytes
            found.append(PhaseTime(SCORING, {"cpu_memory": training.machine.to_cpu(size)}))

    section = config.reward_model
    if section is not None and config.reward_model_on == "engines":
        tokens = section.tokens_per_microbatch or passing
        add("reward model", resolve_value_model(config, section.model), reward_model_settings(config), tokens)
    if work.reference_pass and config.reference_on == "engines":
        add("reference", training.shape, reference_settings(config), passing)
    if not found:
        return None
    flops, sent = sum(each.flops for each in found), sum(each.sent for each in found)
    return PhaseTime(SCORING, total(*(each.parts for each in found)), flops, sent)


def _reward_model(config: RunConfig, training: Training) -> Training | None:
    """Returns the reward model, None without one."""
    section = config.reward_model
    if section is None:
        return None
    ranks = ranks_with(config, section.on, training.layout.world_size)
    return _beside(config, training, section.model, reward_model_settings(config).parallel, ranks)


def _reference(config: RunConfig, training: Training) -> Training:
    """Returns the reference model: the actor's own shape, on judges in a layout of theirs."""
    parallel, ranks = reference_settings(config).parallel, training.layout.world_size
    if config.reference.on != "judges":
        return training
    layout = make_layout(parallel, ranks_with(config, config.reference.on, ranks))
    return replace(training, layout=layout, parallel=parallel)


def _critic(config: RunConfig, training: Training) -> Training:
    ranks = ranks_with(config, config.critic.on, training.layout.world_size)
    return _beside(config, training, config.critic.path, critic_settings(config).parallel, ranks)


def _beside(
    config: RunConfig, training: Training, model: Path | None, parallel: ParallelSection, ranks: int
) -> Training:
    """Returns a model with a value head on ``ranks`` ranks: the one in the folder, else the actor's."""
    shape = training.shape.with_value_head if model is None else resolve_value_model(config, model)
    layout = make_layout(parallel, ranks)
    return replace(training, shape=shape, layout=layout, parallel=parallel)


def _offload(
    config: RunConfig, training: Training, reward_model: Training | None, critic: Training | None
) -> PhaseTime | None:
    """Returns the time of copies to CPU memory and back: weights and optimizer, and frozen models one way."""
    size = offloaded_bytes(training, config.actor.memory, config.actor.optimizer)
    if critic is not None:
        size += offloaded_bytes(critic, critic_settings(config).memory, config.critic.optimizer)
    frozen = []
    if reward_model is not None and reward_model_settings(config).memory.offload.parameters:
        frozen.append(reward_model)
    has_reference = config.algorithm.kl.coefficient > 0 and "reference" not in models_elsewhere(config)
    if config.reference.memory.offload and has_reference:
        frozen.append(training)
    size += sum(each.frozen_bytes for each in frozen)
    return PhaseTime("offload", {"cpu_memory": training.machine.to_cpu(size)}) if size else None


def offloaded_bytes(training: Training, memory: MemorySection, optimizer: OptimizerSection) -> float:
    """Returns a rank's bytes copied to CPU memory and back in a step; gradients are released, not copied."""
    offload = memory.offload
    state = training.optimizer_bytes * (1 - optimizer.optimizer_offload_fraction)
    return 2 * offload.fraction * (offload.parameters * training.weight_bytes + offload.optimizer * state)


# On CPUs and unknown GPUs. Their ratio counts, not their size: steps of a small model, mostly without regard to how
# many sequences they have.
_STEP_SECONDS, _SEQUENCE_SECONDS = 0.02, 0.001
_DIGITS = 4
_LEAST, _MOST = 1e-9, 1e6


def default_costs(config: RunConfig) -> CostsSection:
    """Returns costs for a machine of unknown speed: trainers take as long as the engines with full slots."""
    work, rollout = step_workload(config), config.rollout
    responses = work.generated / max(1, placement_of(config, config.world_size).num_engines)
    slots = max(1.0, min(rollout.sequences, (config.asynchrony.max_staleness + 1) * responses))
    train = responses * work.response / slots * (_STEP_SECONDS + _SEQUENCE_SECONDS * slots)
    return _costs(config, _STEP_SECONDS, _SEQUENCE_SECONDS, train)


def predicted_costs(
    config: RunConfig, shape: ModelDescription, gpu: Gpu, efficiency: EfficiencySection
) -> CostsSection:
    """Returns costs on a known GPU; the defaults if its memory does not hold the engines."""
    placement, work = placement_of(config, config.world_size), step_workload(config)
    layout = make_layout(config.actor.parallel, placement.trainers.size)
    step = predict_step(config, shape, layout, gpu, efficiency)
    if step.sides is None:
        return default_costs(config)
    machine = MachineSpeed(gpu, efficiency, config.resources.ranks_per_node)
    ranks = generating_ranks(config, placement.trainers.size)
    engines = Engines(shape, engine_section(config, shape, gpu.memory_bytes), machine, ranks, config.model.dtype)
    slots = full_slots(engines, work, config.asynchrony.max_staleness)
    each = engine_costs(engines, work, slots, step.phase(SCORING).seconds)
    return _costs(config, *each, step.sides.trainers + step.sides.sync)


def predicted_lend_overhead(
    config: RunConfig, shape: ModelDescription, gpu: Gpu, efficiency: EfficiencySection
) -> float:
    """Returns the seconds of a step in which trainers' ranks that lend neither train nor generate."""
    layout = make_layout(config.actor.parallel, placement_of(config, config.world_size).trainers.size)
    sides = predict_step(config, shape, layout, gpu, efficiency).sides
    return sides.lend_overhead if sides is not None else 0.0


def engine_costs(engines: Engines, work: StepWorkload, slots: float, scoring: float = 0.0) -> tuple[float, float]:
    """Returns the seconds of an engine's step without its sequences, and those that each adds, its share of a prompt
    included: a line through steps of one sequence and of ``slots``. ``scoring``: seconds of a batch in which models
    beside the engines score."""
    context = mean_context(work)
    one, full = (sum(decoding_step(engines, count, context).values()) for count in (1.0, slots))
    slope = (full - one) / (slots - 1) if slots > 1 else 0.0
    shared = 1 / work.group if engines.section.prefix_caching else 1.0
    prompt = sum(prompts_time(engines, shared * work.prompt).values()) / work.response  # over a response's steps
    scored = scoring / (work.generated / engines.count * work.response)
    return max(0.0, one - slope), slope + prompt + scored


def _costs(config: RunConfig, step: float, sequence: float, train: float) -> CostsSection:
    """Returns the costs, of a few digits."""
    found = {"step_seconds": step, "sequence_seconds": sequence, "train_seconds": max(train, _LEAST)}
    rounded = {name: rounded_cost(value) for name, value in found.items()}
    return config.asynchrony.costs.model_copy(update=rounded)


def rounded_cost(seconds: float) -> float:
    """Returns a cost of a few digits."""
    return float(f"{min(max(0.0, seconds), _MOST):.{_DIGITS}g}")
