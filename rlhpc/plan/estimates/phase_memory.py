"""Bytes on a GPU at the peak of a phase, and the phases of the models of judges."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rlhpc.config.schema import RunConfig
from rlhpc.models import ModelDescription
from rlhpc.plan.estimates.model_memory import judge_models
from rlhpc.plan.estimates.optimizer_memory import StateBytes
from rlhpc.plan.estimates.rank_model import RankModel
from rlhpc.sharding.placement import RoleName, judge_ranks

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
