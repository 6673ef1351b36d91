"""Ways to run a layout that a search tries: recomputation, offload, microbatches, and each back end's own settings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from rlhpc.config.schema import RunConfig
from rlhpc.config.training import FrozenMemorySection, OffloadSection
from rlhpc.models import ModelDescription
from rlhpc.plan.estimates.hardware import Gpu
from rlhpc.plan.estimates.train_time import stage_parameters
from rlhpc.plan.layouts import parallel_of
from rlhpc.sharding.layout import ParallelLayout
from rlhpc.sharding.placement import Backend, backend_for

_MICROBATCHES = (1, 2, 4)  # in longest sequences
_LEVELS = ("none", "selective", "full")


@dataclass(frozen=True)
class Offload:
    """State that leaves the GPU while unused."""

    actor: OffloadSection
    reference: FrozenMemorySection


@dataclass(frozen=True)
class Variant:
    """``size``: tokens of a microbatch. ``fraction``: of AdamW on the CPU. The last two are FSDP2's."""

    size: int
    fraction: float
    level: str
    offload: Offload
    accumulation: str = "auto"
    reshards: bool = True


NOTHING = Offload(OffloadSection(), FrozenMemorySection())


def offload_of(config: RunConfig) -> Offload:
    """Returns the offload of a config."""
    return Offload(config.actor.memory.offload, config.reference.memory)


def variants(config: RunConfig, layout: ParallelLayout, shape: ModelDescription, gpu: Gpu) -> Iterator[RunConfig]:
    """Yields configs by recomputation, offload and microbatch, except those whose weights alone are too large."""
    backend = backend_for(config, shape)
    parts = max(stage_parameters(shape, layout), key=lambda part: part.count)
    owned = parts.dense / (layout.dp * layout.cp) + parts.experts / layout.edp
    for found in _all(config, layout, backend):
        if backend == "fsdp" or 6 * parts.count + 12 * (1 - found.fraction) * owned <= gpu.memory_bytes:  # in updates
            yield varied(config, layout, found)


def fastest_variants(config: RunConfig, layout: ParallelLayout, shape: ModelDescription) -> Iterator[RunConfig]:
    """Yields the fastest config with each microbatch size."""
    backend = backend_for(config, shape)
    for size in _sizes(config, layout):
        variant = Variant(size, min(_fractions(config, backend)), "none", NOTHING)
        if backend == "fsdp":
            variant = replace(variant, accumulation="keep", reshards=False)
        yield varied(config, layout, variant)


def leanest(config: RunConfig, layout: ParallelLayout, shape: ModelDescription) -> RunConfig:
    """Returns the config that needs least memory."""
    backend = backend_for(config, shape)
    usual = Variant(min(_sizes(config, layout)), max(_fractions(config, backend)), "full", _offloads(config)[0])
    return varied(config, layout, replace(usual, accumulation="reduce") if backend == "fsdp" else usual)


def varied(config: RunConfig, layout: ParallelLayout, variant: Variant) -> RunConfig:
    """Returns the config with the layout and the variant's settings."""
    actor = config.actor
    memory = {
        "recompute": variant.level,
        "offload_activations": actor.memory.offload_activations and variant.level == "full",
        "offload": variant.offload.actor,
        "accumulation": variant.accumulation,
        "reshard_after_forward": variant.reshards,
    }
    changed = {
        "parallel": parallel_of(actor.parallel, layout),
        "optimizer": actor.optimizer.model_copy(update={"optimizer_offload_fraction": variant.fraction}),
        "memory": actor.memory.model_copy(update=memory),
    }
    return config.model_copy(
        update={
            "actor": actor.model_copy(update=changed),
            "reference": config.reference.model_copy(update={"memory": variant.offload.reference}),
            "train": config.train.model_copy(update={"tokens_per_microbatch": variant.size}),
        }
    )


def _all(config: RunConfig, layout: ParallelLayout, backend: Backend) -> Iterator[Variant]:
    own = [("auto", True)] if backend == "megatron" else list(product(("keep", "reduce"), (False, True)))
    for size, fraction, level, offload, (accumulation, reshards) in product(
        _sizes(config, layout), _fractions(config, backend), _LEVELS, _offloads(config), own
    ):
        yield Variant(size, fraction, level, offload, accumulation, reshards)


def _sizes(config: RunConfig, layout: ParallelLayout) -> list[int]:
    """Returns microbatch sizes: one, two and four longest sequences, and the configured size."""
    longest = -(-(config.data.max_prompt_tokens + config.rollout.max_response_tokens) // layout.cp)
    asked = config.train.tokens_per_microbatch
    return sorted({longest * count for count in _MICROBATCHES} | ({asked} if asked >= longest else set()))


def _fractions(config: RunConfig, backend: Backend) -> list[float]:
    if backend == "fsdp":  # updates on the GPU alone
        return [0.0]
    optimizer = config.actor.optimizer
    return sorted({optimizer.optimizer_offload_fraction} | ({0.0, 1.0} if optimizer.function is None else set()))


def _offloads(config: RunConfig) -> list[Offload]:
    """The one that leaves least on the GPU first."""
    if config.actor.memory.cpu_offload:  # there is nothing of the actor on it
        return [replace(offload_of(config), reference=FrozenMemorySection(offload=True)), offload_of(config)]
    names = ["gradients", "optimizer"] + ([] if config.reshard.share_weights else ["parameters"])
    most = Offload(OffloadSection(**dict.fromkeys(names, True)), FrozenMemorySection(offload=True))
    return list(dict.fromkeys([most, offload_of(config), NOTHING]))
