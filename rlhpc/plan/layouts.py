"""Layouts that a search tries: those that fit model, ranks and batches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from rlhpc.config.schema import RunConfig
from rlhpc.config.training import ParallelSection
from rlhpc.core.errors import UserError
from rlhpc.models import ModelDescription, ModelShape
from rlhpc.plan.checks.backend import model_layout
from rlhpc.plan.checks.judges import check_judges_work
from rlhpc.plan.checks.parallelism import layouts, parallel_of
from rlhpc.plan.estimates.hardware import Gpu, linked_ranks
from rlhpc.plan.estimates.train_time import stage_parameters
from rlhpc.sharding.layout import ParallelLayout, divisors
from rlhpc.sharding.placement import backend_for, judge_ranks

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
    asked = config.actor.parallel
    samples = config.train.prompts_per_step * config.rollout.samples_per_prompt // config.train.minibatches
    sizes = {
        "tp": [tp for tp in divisors(ranks) if tp <= inside],
        "pp": [pp for pp in divisors(ranks) if pp <= shape.num_layers],
        "cp": _contexts(config),
        "ep": divisors(shape.experts.num_experts if shape.experts else 1),
        "etp": sorted({1, asked.etp}),
    }
    for layout in layouts(shape, asked, ranks, sizes):
        # Updates need at least weights and gradients on the device.
        least = max(part.count for part in stage_parameters(shape, layout)) * 2
        if layout.dp <= samples and least <= gpu.memory_bytes and _fits_judges(config, parallel_of(asked, layout)):
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
