"""Where the routed experts of samples are. They are most of what a sample weighs, so a sample's stay on one rank, the
first of the engine that drew it, until a step learns from it: then those ranks get them that train on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from rlhpc.api import Sample
from rlhpc.data.groups import Group
from rlhpc.parallel.transfer import give_objects, give_parts
from rlhpc.rollout.collect import Scored
from rlhpc.rollout.requests import share_of
from rlhpc.sharding.dispatch import PIPELINE_AS_DATA
from rlhpc.trainer.advantages import needs_old_log_probs
from rlhpc.trainer.batches import passing_plans, update_plans
from rlhpc.trainer.build import Run


def without_routed_experts(found: Sequence[Scored]) -> list[Scored]:
    """As they go to all ranks."""
    return [replace(scored, sample=replace(scored.sample, routed_experts=None)) for scored in found]


def trained_routed_experts(run: Run, samples: Sequence[Sample]) -> list[Sample]:
    """A step's samples, with routed experts on the ranks that train on them, and there alone; a pipeline rank has those
    of its own layers. Collective."""
    if not run.config.actor.moe.router_replay:
        return list(samples)
    role, plans = run.models.actor, list(update_plans(run, run.models.actor, samples))
    if needs_old_log_probs(run):
        plans += passing_plans(run, role, samples)
    mine: dict[int, dict[int, np.ndarray]] = {}
    for part in range(PIPELINE_AS_DATA.parts(role.layout)):
        share, stage = divmod(part, role.layout.pp)
        held = {i for plan in plans for ids in plan.bins[share] for i in ids if samples[i].routed_experts is not None}
        layers = role.expert_layers(stage)
        if held and layers:
            mine[part] = {i: samples[i].routed_experts[:, layers] for i in sorted(held)}
    parts = give_parts(PIPELINE_AS_DATA, role.layout, mine).values()
    given = {i: routed_experts for part in parts for i, routed_experts in part.items()}
    return [replace(sample, routed_experts=given.get(i)) for i, sample in enumerate(samples)]


def moved_routed_experts(run: Run, groups: Sequence[Group]) -> list[Group]:
    """Groups that are put under way, shared out to the engines in their order, with the routed experts of what is to be
    gone on with on the first rank of the engine that goes on with it. Collective."""
    if not run.config.actor.moe.router_replay:
        return list(groups)
    tp = run.config.rollout.tp
    leaders = [engine * tp for engine in range(run.num_engines) for _ in share_of(len(groups), run.num_engines, engine)]
    mine: dict[int, dict[tuple[int, int], np.ndarray]] = {}
    for place, (leader, group) in enumerate(zip(leaders, groups, strict=True)):
        for index in _drafts(group):
            if group.samples[index].routed_experts is not None:
                mine.setdefault(leader, {})[place, index] = group.samples[index].routed_experts
    given = {key: routed_experts for part in give_objects(mine).values() for key, routed_experts in part.items()}
    return [
        _with_routed_experts(group, {index: given.get((place, index)) for index in _drafts(group)})
        for place, group in enumerate(groups)
    ]


def _drafts(group: Group) -> list[int]:
    return [index for index, scored in enumerate(group.scored) if not scored]


def _with_routed_experts(group: Group, routed_experts: dict[int, np.ndarray | None]) -> Group:
    samples = tuple(
        replace(sample, routed_experts=routed_experts[index]) if index in routed_experts else sample
        for index, sample in enumerate(group.samples)
    )
    return replace(group, samples=samples)
