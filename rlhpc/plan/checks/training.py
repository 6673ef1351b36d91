"""Checks optimizers, memory and experts against each other and the model."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd

from rlhpc.config.schema import RunConfig
from rlhpc.config.training import MemorySection, MoeSection, OptimizerSection
from rlhpc.core.errors import Faults, UserError
from rlhpc.models import ModelDescription
from rlhpc.sharding.layout import ParallelLayout, divisors
from rlhpc.sharding.placement import Backend

_MUONS = ("momentum", "nesterov", "ns_steps")  # keys of Muon alone


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
    if section.function is not None and section.name != "adamw":
        raise UserError(
            f"{section.name} beside your own optimizer {section.function}",
            where=f"{key}.name",
            remedy=f"leave it or {key}.function out",
        )
    if section.function is not None and section.optimizer_offload_fraction:
        raise UserError(
            f"{section.optimizer_offload_fraction} with {section.function}: only AdamW can update on the CPU",
            where=f"{key}.optimizer_offload_fraction",
            remedy=f"set it to 0, or leave {key}.function out",
        )
    for name in _MUONS:
        if section.name != "muon" and getattr(section, name) != OptimizerSection.model_fields[name].default:
            raise UserError(
                f"{str(getattr(section, name)).lower()} with {section.function or section.name}: it is Muon's",
                where=f"{key}.{name}",
                remedy=f"leave it out, or set {key}.name to muon",
            )


def check_experts(section: MoeSection, shape: ModelDescription) -> None:
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


def check_memory(
    memory: MemorySection, shape: ModelDescription, layout: ParallelLayout, backend: Backend = "megatron"
) -> None:
    """Refuses recomputation of absent modules, or in groups that the back end does not form, and offload of activations
    without recomputation of layers."""
    if memory.offload_activations and memory.recompute != "full":
        raise UserError(
            f"true with recompute {memory.recompute}, but only inputs of recomputed layers are offloaded",
            where="actor.memory.offload_activations",
            remedy="set actor.memory.recompute to full, or leave it out",
        )
    if memory.recompute == "selective":
        _check_modules(memory.recompute_modules, shape)
    elif memory.recompute == "full" and backend == "fsdp" and memory.recompute_layers > 1:
        raise UserError(
            f"groups of {memory.recompute_layers} layers with train.backend fsdp, which recomputes each by itself",
            where="actor.memory.recompute_layers",
            remedy="leave it out, or use train.backend megatron",
        )
    elif memory.recompute == "full":
        _check_groups(memory.recompute_layers, shape, layout)


def _check_modules(modules: Sequence[str], shape: ModelDescription) -> None:
    if not shape.experts and not {"core_attn", "mlp"} & set(modules):
        raise UserError(
            f"the model has none of {list(modules)}" if modules else "no modules to recompute",
            where="actor.memory.recompute_modules",
            remedy="use core_attn, mlp or both, or set actor.memory.recompute to none",
        )


def _check_groups(size: int, shape: ModelDescription, layout: ParallelLayout) -> None:
    """Refuses groups of unequal size, which Megatron cannot form (transformer_block.py:535)."""
    lengths = sorted({layers // (layout.vpp or 1) for layers in layout.stage_layers(shape.num_layers)})
    if any(length % size for length in lengths):
        raise UserError(
            f"groups of {size} layers do not divide stages of {' and '.join(map(str, lengths))} layers",
            where="actor.memory.recompute_layers",
            remedy=f"use one of {divisors(gcd(*lengths))}",
        )
