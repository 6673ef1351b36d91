"""Checks optimizers, memory and experts against each other and the model."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd

from rlhpc.config.schema import RunConfig
from rlhpc.config.training import MemorySection, MoeSection, OptimizerSection
from rlhpc.core.errors import Faults, UserError
from rlhpc.models import ModelShape
from rlhpc.sharding.layout import ParallelLayout, divisors


def check_optimizers(config: RunConfig) -> None:
    """Checks the optimizers of both phases."""
    sections = {"actor.optimizer": config.actor.optimizer}
    if config.sft is not None:
        sections["sft.optimizer"] = config.sft.optimizer
    faults = Faults()
    for key, section in sections.items():
        with faults.collect():
            check_optimizer(key, section)
    faults.raise_all()


def check_optimizer(key: str, section: OptimizerSection) -> None:
    """Checks the optimizer section at ``key``."""
    if section.function is None and section.arguments:
        raise UserError(
            f"{', '.join(section.arguments)} without a function to take them",
            where=f"{key}.arguments",
            remedy=f"set {key}.function, or leave them out",
        )
    if section.function is not None and section.optimizer_offload_fraction:
        raise UserError(
            f"{section.optimizer_offload_fraction} with {section.function}: only AdamW can update on the CPU",
            where=f"{key}.optimizer_offload_fraction",
            remedy=f"set it to 0, or leave {key}.function out",
        )


def check_experts(section: MoeSection, shape: ModelShape) -> None:
    """Refuses router replay in a model without experts."""
    if section.router_replay and shape.experts is None:
        raise UserError(
            "the model has no experts", where="actor.moe.router_replay", remedy="set it to false, or leave it out"
        )


def check_sharing(config: RunConfig) -> None:
    """Refuses sharing of weights that move, or with the gather method."""
    if config.reshard.share_weights and config.actor.memory.offload.parameters:
        raise UserError(
            "engines cannot share weights that are offloaded (actor.memory.offload.parameters)",
            where="reshard.share_weights",
            remedy="set one of the two to false",
        )
    if config.reshard.share_weights and config.reshard.method == "gather":
        raise UserError(
            "method gather copies whole tensors and shares nothing",
            where="reshard.share_weights",
            remedy="set it to false, or reshard.method to direct",
        )


def check_memory(memory: MemorySection, shape: ModelShape, layout: ParallelLayout) -> None:
    """Refuses recomputation of absent modules, or in groups that do not divide the stages."""
    if memory.recompute == "selective":
        _check_modules(memory.recompute_modules, shape)
    elif memory.recompute == "full":
        _check_groups(memory.recompute_layers, shape, layout)


def _check_modules(modules: Sequence[str], shape: ModelShape) -> None:
    if not shape.experts and not {"core_attn", "mlp"} & set(modules):
        raise UserError(
            f"the model has none of {list(modules)}" if modules else "no modules to recompute",
            where="actor.memory.recompute_modules",
            remedy="use core_attn, mlp or both, or set actor.memory.recompute to none",
        )


def _check_groups(size: int, shape: ModelShape, layout: ParallelLayout) -> None:
    """Refuses groups of unequal size, which Megatron cannot form (transformer_block.py:535)."""
    lengths = sorted({layers // (layout.vpp or 1) for layers in layout.stage_layers(shape.num_layers)})
    if any(length % size for length in lengths):
        raise UserError(
            f"groups of {size} layers do not divide stages of {' and '.join(map(str, lengths))} layers",
            where="actor.memory.recompute_layers",
            remedy=f"use one of {divisors(gcd(*lengths))}",
        )
