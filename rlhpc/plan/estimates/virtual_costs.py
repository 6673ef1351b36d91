"""Constants of the virtual time that a separate placement's schedule follows, predicted before the run."""

from __future__ import annotations

from rlhpc.config.placement import CostsSection
from rlhpc.config.schema import RunConfig
from rlhpc.config.site import EfficiencySection
from rlhpc.models import ModelDescription
from rlhpc.plan.estimates.hardware import Gpu
from rlhpc.plan.estimates.memory import engine_section
from rlhpc.plan.estimates.rollout_time import Engines, decoding_step, prompts_time
from rlhpc.plan.estimates.roofline import MachineSpeed
from rlhpc.plan.estimates.separate import full_slots, mean_context
from rlhpc.plan.estimates.step_time import SCORING, predict_step
from rlhpc.plan.estimates.workload import StepWorkload, step_workload
from rlhpc.sharding.layout import make_layout
from rlhpc.sharding.placement import generating_ranks, placement_of

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
