"""Moves the routed experts of samples. They are the largest part of a sample, so they stay on one rank, the first of
the engine that generated it, until a step trains on it: then the ranks get them that train on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from rlhpc.api import Sample
from rlhpc.data.groups import Group
from rlhpc.parallel.transfer import PIPELINE_AS_DATA, give_objects, give_parts
from rlhpc.rollout.collect import Scored
from rlhpc.trainer.batches import Batching, forward_plans, update_plans
from rlhpc.trainer.roles import EngineRank, Role


def without_routed_experts(found: Sequence[Scored]) -> list[Scored]:
    """The samples as they are sent to all ranks."""
    return [replace(scored, sample=replace(scored.sample, routed_experts=None)) for scored in found]


def trained_routed_experts(role: Role, batching: Batching, samples: Sequence[Sample], step: int) -> list[Sample]:
    """A step's samples, with routed experts only on the ranks that train on them, in any of its epochs; a pipeline rank
    has those of its own layers. Collective."""
    if not role.router_replay:
        return list(samples)
    plans = [plan for epoch in dict.fromkeys(update_plans(role, batching, samples, step)) for plan in epoch]
    if batching.old_log_probs:
        plans += forward_plans(role, batching, samples)
    mine: dict[int, dict[int, np.ndarray]] = {}
    for part in range(PIPELINE_AS_DATA.parts(role.layout)):
        share, stage = divmod(part, role.layout.pp)
        layers = role.expert_layers(stage)
        here = {i: samples[i].routed_experts for plan in plans for ids in plan.bins[share] for i in ids}
        held = {i: experts[:, layers] for i, experts in sorted(here.items()) if experts is not None}
        if held and layers:
            mine[part] = held
    parts = give_parts(PIPELINE_AS_DATA, role.layout, mine).values()
    given = {i: routed_experts for part in parts for i, routed_experts in part.items()}
    return [replace(sample, routed_experts=given.get(i)) for i, sample in enumerate(samples)]


def moved_routed_experts(place: EngineRank, groups: Sequence[Group]) -> list[Group]:
    """Groups that are shared out to the engines in their order; the routed experts of their unfinished responses move
    to the first rank of the engine that resumes them. Collective."""
    mine: dict[int, dict[tuple[int, int], np.ndarray]] = {}
    for number, (leader, group) in enumerate(zip(place.leaders(len(groups)), groups, strict=True)):
        for index in _drafts(group):
            routed_experts = group.samples[index].routed_experts
            if routed_experts is not None:
                mine.setdefault(leader, {})[number, index] = routed_experts
    given = {key: routed_experts for part in give_objects(mine).values() for key, routed_experts in part.items()}
    return [
        _with_routed_experts(group, {index: given.get((number, index)) for index in _drafts(group)})
        for number, group in enumerate(groups)
    ]


def _drafts(group: Group) -> list[int]:
    return [index for index, scored in enumerate(group.scored) if not scored]


def _with_routed_experts(group: Group, routed_experts: dict[int, np.ndarray | None]) -> Group:
    samples = tuple(
        replace(sample, routed_experts=routed_experts[index]) if index in routed_experts else sample
        for index, sample in enumerate(group.samples)
    )
    return replace(group, samples=samples)
