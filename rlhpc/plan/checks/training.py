"""Checks of the algorithm, optimizers, memory and experts against each other and the model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import gcd

from rlhpc.config.algorithm import DEFAULTS, AlgorithmSection
from rlhpc.config.schema import RunConfig
from rlhpc.config.training import MemorySection, MoeSection, OptimizerSection
from rlhpc.core.errors import Faults, UserError, did_you_mean
from rlhpc.models import ModelDescription
from rlhpc.sharding.layout import ParallelLayout, divisors
from rlhpc.sharding.placement import Backend

# Algorithms without the clipped surrogate, which alone has a dual clip.
_WITHOUT_DUAL_CLIP = ("gspo", "cispo")
# Algorithms that compare a response with no other one to the same prompt.
_WITHOUT_GROUPS = ("reinforce_plus_plus", "remax", "ppo")
_DISCOUNTED = ("reinforce_plus_plus", "ppo")


def check_algorithm(config: RunConfig) -> None:
    """Refuses keys without meaning or effect; of a user's own algorithm, only the common keys are checked."""
    Faults(_faults(config)).raise_all()


def _faults(config: RunConfig) -> Iterator[UserError]:
    section = config.algorithm
    own = ":" in section.name
    if not own and section.name not in DEFAULTS:
        yield UserError(
            f"unknown algorithm {section.name!r}", where="algorithm.name", remedy=did_you_mean(section.name, DEFAULTS)
        )
        own = True  # nothing is known of its keys
    yield from _common(section)
    if own:
        return
    yield from _named(section)
    single = config.rollout.samples_per_prompt < 2
    if single and section.name not in _WITHOUT_GROUPS and config.train.steps and config.train.step is None:
        yield UserError(
            f"{section.name} compares the responses to a prompt, and there is only one: it would learn nothing",
            where="rollout.samples_per_prompt",
            remedy=f"use at least 2, or {', '.join(_WITHOUT_GROUPS[:-1])} or {_WITHOUT_GROUPS[-1]}",
        )


def _common(section: AlgorithmSection) -> Iterator[UserError]:
    if section.aggregation_length is not None and section.aggregation != "constant":
        yield UserError(
            f"{section.aggregation} is not divided by a constant",
            where="algorithm.aggregation_length",
            remedy="leave it out, or set algorithm.aggregation to constant",
        )
    if section.kl.target is not None and not section.kl.coefficient:
        yield UserError(
            "a coefficient of 0 does not adapt",
            where="algorithm.kl.target",
            remedy="leave it out, or set algorithm.kl.coefficient above 0",
        )
    bounds = section.rollout_correction
    if bounds.method == "mask" and bounds.low >= bounds.high:
        yield UserError(
            f"no weight is between {bounds.low:g} and {bounds.high:g}",
            where="algorithm.rollout_correction.low",
            remedy="set it below algorithm.rollout_correction.high",
        )


def _named(section: AlgorithmSection) -> Iterator[UserError]:
    if section.dual_clip is not None and section.name in _WITHOUT_DUAL_CLIP:
        yield UserError(
            f"the loss of {section.name} has no dual clip", where="algorithm.dual_clip", remedy="leave it out"
        )
    if section.gamma != 1 and section.name not in _DISCOUNTED:
        yield UserError(
            f"{section.name} does not discount: all tokens of a response share its reward",
            where="algorithm.gamma",
            remedy="leave it out, or use reinforce_plus_plus or ppo",
        )
    if section.gae_lambda != 1 and section.name != "ppo":
        yield UserError(
            f"{section.name} has no critic to bootstrap from",
            where="algorithm.gae_lambda",
            remedy="leave it out, or use ppo",
        )
    if section.name == "dr_grpo" and section.normalise_std:
        yield UserError(
            "dr_grpo is GRPO without the division by the deviation",
            where="algorithm.normalise_std",
            remedy="leave it out, or use grpo",
        )


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
