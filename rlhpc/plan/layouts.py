"""Layouts that a search tries: those that fit model, ranks and batches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from itertools import product
from typing import Any

from rlhpc.config.schema import RunConfig
from rlhpc.config.training import ParallelSection
from rlhpc.core.errors import UserError
from rlhpc.models import ModelDescription, ModelShape
from rlhpc.plan.checks.backend import model_layout
from rlhpc.plan.checks.judges import check_judges_work
from rlhpc.plan.checks.parallelism import misfits
from rlhpc.plan.estimates.hardware import Gpu, linked_ranks
from rlhpc.plan.estimates.train_time import stage_parameters
from rlhpc.sharding.layout import ParallelLayout, divisors
from rlhpc.sharding.placement import backend_for, judge_ranks

LAYOUT_KEYS = ("tp", "pp", "cp", "ep", "etp", "vpp", "first_stage_layers", "last_stage_layers")
_VIRTUAL = (2, 3, 4, 5, 6)
_CONTEXT = (1, 2, 4, 8)


def legal_layouts(config: RunConfig, shape: ModelDescription, ranks: int, gpu: Gpu) -> Iterator[ParallelLayout]:
    """Yields layouts that fit model, ranks and batches, with weights that fit; tp stays among linked GPUs.

    With FSDP2, those of as many copies of the weights as configured.
    """
    if backend_for(config, shape) == "fsdp":
        yield from _mesh_layouts(config, shape, ranks)
        return
    assert isinstance(shape, ModelShape), "megatron trains known families"
    inside = linked_ranks(config.resources.ranks_per_node, gpu)
    experts = shape.experts.num_experts if shape.experts else 1
    asked = config.actor.parallel
    samples = config.train.prompts_per_step * config.rollout.samples_per_prompt // config.train.minibatches
    axes = product(divisors(ranks), divisors(ranks), _contexts(config), divisors(experts), sorted({1, asked.etp}))
    for tp, pp, cp, ep, etp in axes:
        if tp > inside or pp > shape.num_layers or ranks % (tp * pp * cp) or ranks % (ep * etp * pp):
            continue
        if ranks // (tp * pp * cp) > samples or ep * etp > ranks // pp:
            continue
        for stages in _stages(shape.num_layers, pp):
            layout = ParallelLayout(ranks, tp=tp, pp=pp, cp=cp, ep=ep, etp=etp, **stages)
            # Updates need at least weights and gradients on the device.
            least = max(part.count for part in stage_parameters(shape, layout)) * 2
            parallel = parallel_of(asked, layout)
            fits = least <= gpu.memory_bytes and not any(misfits(shape, layout, parallel))
            if fits and _fits_judges(config, parallel):
                yield layout


def _contexts(config: RunConfig) -> list[int]:
    """Returns sizes of context parallelism: for long sequences, and as configured."""
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    return [cp for cp in _CONTEXT if cp == config.actor.parallel.cp or cp == 1 or longest // cp >= 4096]


def _mesh_layouts(config: RunConfig, shape: ModelDescription, ranks: int) -> Iterator[ParallelLayout]:
    asked = config.actor.parallel
    samples = config.train.prompts_per_step * config.rollout.samples_per_prompt // config.train.minibatches
    for cp in _contexts(config):
        with suppress(UserError):
            parallel = asked.model_copy(update={"cp": cp})
            layout = model_layout("fsdp", parallel, ranks, shape)
            if layout.dp <= samples and _fits_judges(config, parallel):
                yield layout


def _fits_judges(config: RunConfig, parallel: ParallelSection) -> bool:
    """True if models on judges fit their ranks, which have the actor's layout by default."""
    if not judge_ranks(config):
        return True
    with suppress(UserError):
        check_judges_work(config.model_copy(update={"actor": config.actor.model_copy(update={"parallel": parallel})}))
        return True
    return False


def _stages(layers: int, pp: int) -> Iterator[dict[str, Any]]:
    """Yields layers of the first and last of ``pp`` nearly equal stages, with and without virtual stages."""
    if pp == 1:
        yield {}
        return
    splits: dict[tuple[int | None, int | None], list[int]] = {}
    if layers % pp == 0:
        splits[None, None] = [layers // pp]
    for each in {layers // pp, -(-layers // pp)} - {0}:
        ends = layers - each * (pp - 2)
        for last in (ends // 2, each - 1, each, each + 1):
            first = ends - last
            if last >= 1 and first >= 1 and max(first, last) <= 1.5 * each + 1 and (first, last) != (each, each):
                splits[first if first != each else None, last if last != each else None] = [each, first, last]
    for (begin, end), sizes in splits.items():
        ends_of = {"first_stage_layers": begin, "last_stage_layers": end}
        yield ends_of
        for vpp in _VIRTUAL:
            if all(size % vpp == 0 for size in sizes):
                yield {**ends_of, "vpp": vpp}


def parallel_of(asked: ParallelSection, layout: ParallelLayout) -> ParallelSection:
    """Returns the section ``asked`` with the sizes of the layout."""
    return asked.model_copy(update={name: getattr(layout, name) for name in LAYOUT_KEYS})
