"""Simulates steps of both placements with the engines' own schedule, on a smaller job of the same proportions.

At most a few engines with a few sequences each are simulated: with as many waves of responses, as long a tail and the
same time of each step, of training and of a weight sync as in the whole job.
"""

from __future__ import annotations

from dataclasses import replace
from math import erf, exp, log, sqrt

from rlhpc.config.rollout import CostsSection
from rlhpc.config.schema import RunConfig
from rlhpc.config.site import EfficiencySection
from rlhpc.models import ModelDescription
from rlhpc.plan.estimates.hardware import Gpu
from rlhpc.plan.estimates.memory import engine_section
from rlhpc.plan.estimates.rollout_time import Engines, cache_tokens, prompts_time
from rlhpc.plan.estimates.roofline import MachineSpeed
from rlhpc.plan.estimates.separate import full_slots, mean_context
from rlhpc.plan.estimates.step_time import SCORING, StepTime, engine_costs
from rlhpc.plan.estimates.workload import step_workload
from rlhpc.rollout.schedule.generation_load import GenerationLoad, Simulated, colocated
from rlhpc.rollout.schedule.simulator import separate, with_lending
from rlhpc.sharding.placement import placement_of

_ENGINES, _RESPONSES = 8, 128  # at most; responses of an engine in a step
_STEPS, _WARM = 12, 4
_BISECTIONS = 40


def simulate(
    config: RunConfig, shape: ModelDescription, step: StepTime, gpu: Gpu, efficiency: EfficiencySection
) -> Simulated:
    """Returns simulated steps of the run that ``step`` predicts, in its placement."""
    load = smaller(load_of(config, shape, step, gpu, efficiency))
    if step.sides is None:
        return colocated(load, steps=_STEPS)
    section, lend = config.asynchrony, config.asynchrony.costs.lend_seconds
    if load.lenders and lend is None:
        return with_lending(load, section.max_staleness, steps=_STEPS, warm=_WARM)
    costs = load.costs(lend=lend or 0.0)
    return separate(load, section.max_staleness, costs=costs, in_flight=section.in_flight, steps=_STEPS, warm=_WARM)


def best_lend_seconds(config: RunConfig, costs: CostsSection, overhead: float = 0.0) -> float:
    """Returns the time of a step in which trainers' ranks should generate, if that of everything else is ``costs``.
    ``overhead``: in which they do neither."""
    placement, work = placement_of(config, config.world_size), step_workload(config)
    load = GenerationLoad(
        engines=placement.num_engines,
        groups_per_step=work.samples // work.group,
        samples_per_group=work.group,
        slots=config.rollout.sequences,
        step_seconds=costs.step_seconds or 0.0,
        sequence_seconds=costs.sequence_seconds or 0.0,
        train_seconds=costs.train_seconds or 0.0,
        mean_tokens=_mean_before_cut(work.response, work.longest, work.spread),
        most_tokens=work.longest,
        spread=work.spread,
        kept=work.samples / work.generated,
        lenders=placement.num_lenders,
        lend_overhead_seconds=overhead,
        dealing=config.rollout.dealing,
        jitter=0.0,
    )
    return with_lending(smaller(load), config.asynchrony.max_staleness, steps=_STEPS, warm=_WARM).lend_seconds


def load_of(
    config: RunConfig, shape: ModelDescription, step: StepTime, gpu: Gpu, efficiency: EfficiencySection
) -> GenerationLoad:
    """Returns what a step of the whole job generates, and how long that takes."""
    work, machine = step.work, MachineSpeed(gpu, efficiency, config.resources.ranks_per_node)
    ranks = step.engine_ranks or step.ranks
    engines = Engines(shape, engine_section(config, shape, gpu.memory_bytes), machine, ranks, config.model.dtype)
    slots = full_slots(engines, work, config.asynchrony.max_staleness)
    costs = engine_costs(engines, work, slots, step.phase(SCORING).seconds)
    sides, sync = step.sides, step.sync
    if sides is not None and sync is not None:
        training, transfer, switch = sides.trainers, sync.transfer, sync.write
    else:
        aside = [step.phase(name).seconds for name in ("weight sync", "rollout")]
        training, transfer, switch = step.seconds - sum(aside), aside[0], 0.0
    room, in_flight = cache_tokens(engines) / mean_context(work), slots * mean_context(work)
    return GenerationLoad(
        engines=engines.count,
        groups_per_step=work.samples // work.group,
        samples_per_group=work.group,
        slots=max(1, int(min(engines.section.sequences, room))),
        step_seconds=costs[0],
        sequence_seconds=costs[1],
        train_seconds=training,
        mean_tokens=_mean_before_cut(work.response, work.longest, work.spread),
        most_tokens=work.longest,
        spread=work.spread,
        sync_seconds=transfer,
        switch_seconds=switch,
        prefill_seconds=sum(prompts_time(engines, in_flight).values()) / in_flight,
        prompt_tokens=work.prompt / (work.group if engines.section.prefix_caching else 1),
        kept=work.samples / work.generated,
        lenders=round(sides.lenders * engines.count) if sides is not None else 0,
        lend_overhead_seconds=sides.lend_overhead if sides is not None else 0.0,
        dealing=config.rollout.dealing,
        jitter=0.0,
    )


def smaller(load: GenerationLoad) -> GenerationLoad:
    """Returns the load of fewer engines, responses and slots, whose steps take as long."""
    engines = min(load.engines, _ENGINES)
    each = load.groups_per_step * load.samples_per_group / load.kept / load.engines
    total = min(each, _RESPONSES) * engines * load.kept
    groups = max(1, engines, round(total / load.samples_per_group))
    samples = max(1, round(total / groups))
    share = groups * samples / load.kept / engines / each
    slots = max(1, round(load.slots * share))
    return replace(
        load,
        engines=engines,
        groups_per_step=groups,
        samples_per_group=samples,
        slots=slots,
        lenders=min(load.lenders, max(1, round(load.lenders * engines / load.engines))),
        sequence_seconds=load.sequence_seconds * load.slots / slots,
        prefill_seconds=load.prefill_seconds * load.slots / slots,
    )


def _mean_before_cut(mean: float, longest: float, spread: float) -> float:
    """Returns the mean of the log-normal distribution whose values, cut off at ``longest``, have that mean."""
    if spread == 0 or mean >= longest:
        return mean

    def cut(whole: float) -> float:
        middle = log(whole) - spread**2 / 2
        reached = (log(longest) - middle) / spread
        return whole * _normal(reached - spread) + longest * (1 - _normal(reached))

    low, high = mean, mean * exp(8 * spread)
    for _ in range(_BISECTIONS):
        between = sqrt(low * high)
        low, high = (between, high) if cut(between) < mean else (low, between)
    return high


def _normal(score: float) -> float:
    return (1 + erf(score / sqrt(2))) / 2
