"""Checks limits that a run would hit after hours: lengths, KV cache, disk, memory. Refuses, or warns.

Warnings are lines with key, value and remedy.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import suppress
from itertools import product
from pathlib import Path

from rlhpc.config.schema import RunConfig
from rlhpc.config.site import EfficiencySection
from rlhpc.core.errors import Faults, UserError
from rlhpc.models import ModelDescription, ModelShape, has_dynamic_rope, read_config
from rlhpc.plan.checks.cache import (
    HIGHEST_UTILIZATION,
    cache_key,
    cache_remedy,
    engine_remedy,
    generates,
    holds_sequence,
    larger_engines,
)
from rlhpc.plan.checks.parallelism import check_engine
from rlhpc.plan.estimates.checkpoint_size import checkpoint_bytes, export_bytes, kept_exports
from rlhpc.plan.estimates.fsdp_parameters import is_plannable
from rlhpc.plan.estimates.hardware import Gpu, cpu_memory_limit, linked_ranks, named_gpu, read_site
from rlhpc.plan.estimates.memory import GIB, MemoryPlan, engine_memory, predict_memory, sequence_tokens
from rlhpc.plan.estimates.step_time import predict_rollout
from rlhpc.sharding.layout import ParallelLayout, divisors
from rlhpc.sharding.placement import generating_ranks

_INSIDE = ("tp", "etp")  # axes whose ranks communicate in every layer


def check_limits(
    config: RunConfig,
    shape: ModelDescription,
    layout: ParallelLayout | None,
    *,
    prepared: bool = True,
    starting: bool = True,
) -> list[str]:
    """Returns the warnings of all checks below. Raises UserError with all that cannot work.

    ``layout`` None: it is invalid, and only lengths and disk are checked. ``prepared`` false: models other than the
    actor may not exist yet. ``starting`` false: a disk that is too small is a warning.
    """
    faults, disk = Faults(), Faults()
    warnings: list[str] = []
    with faults.collect():
        warnings += check_lengths(config, shape)
    if layout is not None:
        with faults.collect():
            warnings += _check_machine(config, shape, layout, prepared=prepared)
    with disk.collect():
        warnings += check_disk(config, shape)
    if starting:
        faults.errors += disk.errors
    warnings += [f"{error}; `rlhpc run` and `rlhpc submit` refuse it" for error in disk.errors if not starting]
    faults.raise_all()
    return warnings


def _check_machine(config: RunConfig, shape: ModelDescription, layout: ParallelLayout, *, prepared: bool) -> list[str]:
    """Returns the warnings of checks of GPUs and network."""
    site = read_site(config)
    gpu = named_gpu(config, site)
    gib = gpu.memory_gib if gpu else None
    warnings = [*check_cache(config, shape, gib), *check_network(config, shape, gpu, site.efficiency)]
    warnings += check_tensor_parallel(config, gpu)
    if gpu is not None and gib is not None and prepared and is_plannable(shape):
        plan = predict_memory(config, shape, layout, gib, gpu.reserves)
        if plan.refused_engine is not None:
            warnings.append(_refused_engine(config, shape, plan, *plan.refused_engine))
        elif (phase := plan.first_too_large) is not None:
            warnings.append(
                f"memory: {phase.name} needs about {phase.total / GIB:,.0f} GiB on rank {plan.rank_of(phase)}, a GPU "
                f"has {gib:g}; `rlhpc plan` shows what helps"
            )
        warnings += check_cpu_memory(config, plan, gpu)
    return warnings


def _refused_engine(config: RunConfig, shape: ModelDescription, plan: MemoryPlan, claimed: int, free: int) -> str:
    """Warns that the engine needs more memory than the trainer leaves free."""
    section, total = config.rollout, plan.gpu_bytes or 0
    engine, sequence = engine_memory(config, shape, total), sequence_tokens(config)
    key, fits, enough = engine.fitting_setting(section, claimed, free, total, sequence)
    if section.kv_cache_gib is not None:
        what = f"with a KV cache of {section.kv_cache_gib:g} GiB an engine needs"
    else:
        what = f"at {section.gpu_memory_utilization:g} an engine needs"
    rank, beside = (
        (plan.rank, "the trainer") if plan.engine_rank is None else (plan.engine_rank, _beside_engine(config))
    )
    has = f"rank {rank} has about {max(0, free) / GIB:,.1f} free beside {beside}"
    offload = config.actor.memory.offload
    options = [f"set it to {fits:g}"] if enough else []
    if plan.engine_rank is None and not (offload.parameters and offload.gradients and offload.optimizer):
        options.append("offload more (actor.memory.offload)")
    if engine.smallest(sequence) > HIGHEST_UTILIZATION * total or not options:  # no offload frees that much
        options = [engine_remedy(config, shape, total / GIB) or "use more or larger GPUs"]
    helps = " or ".join(options)
    return f"rollout.{key}: {what} {claimed / GIB:,.1f} GiB, and {has}; {helps}; `rlhpc plan` shows what helps"


def _beside_engine(config: RunConfig) -> str:
    on_engines = {"the reference": config.reference_on, "the reward model": config.reward_model_on}
    models = [name for name, on in on_engines.items() if on == "engines"]
    return " and ".join([*models, "its libraries"])


def check_lengths(config: RunConfig, shape: ModelDescription) -> Iterator[str]:
    """Refuses prompts with responses that exceed the model's positions; warns if only rotary scaling reaches them."""
    if not config.train.steps and not config.data.validation:
        return
    prompt, response = config.data.max_prompt_tokens, config.rollout.max_response_tokens
    limit = shape.usable_positions
    if prompt + response > limit:
        scaled = f", {limit} with its rope scaling" if limit > shape.max_positions else ""
        raise UserError(
            f"{response} response tokens after data.max_prompt_tokens {prompt} exceed the model's "
            f"{shape.max_positions} positions (max_position_embeddings{scaled})",
            where="rollout.max_response_tokens",
            remedy=f"lower them to {limit} together{_or_fixed(config, shape)}",
        )
    if prompt + response > shape.max_positions:
        kind = shape.rope.kind if shape.rope else ""
        yield (
            f"rollout.max_response_tokens: {response} after prompts of {prompt} are more than the model's "
            f"{shape.max_positions} positions, which only its rope scaling ({kind}) reaches; lower them if "
            "it was not trained for that"
        )


def _or_fixed(config: RunConfig, shape: ModelDescription) -> str:
    """How dynamic RoPE reaches further, as part of a remedy."""
    if config.model.rope_tokens is not None:
        return ", or raise model.rope_tokens"
    needed = sequence_tokens(config)
    return f", or set model.rope_tokens to {needed} at least" if shape.rope and shape.rope.kind == "dynamic" else ""


def check_rope_tokens(config: RunConfig) -> None:
    """Refuses model.rope_tokens for an actor without dynamic RoPE; one that does not exist yet is not checked."""
    if config.model.rope_tokens is None or not (config.model.path / "config.json").is_file():
        return
    if not has_dynamic_rope(read_config(config.model.path)):
        raise UserError(
            f"{config.model.rope_tokens}, but the model has no dynamic RoPE",
            where="model.rope_tokens",
            remedy="leave it out",
        )


def check_cache(config: RunConfig, shape: ModelDescription, gpu_gib: float | None) -> Iterator[str]:
    """Refuses a KV cache too small for one sequence; warns if it cannot hold all concurrent ones."""
    section = config.rollout
    if (section.kv_cache_gib is None and gpu_gib is None) or not generates(config):
        return
    engine = engine_memory(config, shape, None if gpu_gib is None else int(gpu_gib * GIB))
    key = cache_key(section)
    value = getattr(section, key)
    length = sequence_tokens(config)
    if not holds_sequence(config, shape, gpu_gib):
        raise UserError(
            f"{value} leaves a KV cache of {max(0, engine.tokens):,} tokens of {engine.token / 1024:,.0f} KiB "
            f"(config.json), a prompt with its response has {length:,}",
            where=f"rollout.{key}",
            remedy=cache_remedy(config, shape, gpu_gib),
        )
    engines = max(1, generating_ranks(config, config.world_size) // section.tp)
    samples = -(-config.train.prompts_per_step * section.samples_per_prompt // engines)
    running = min(section.sequences, samples) if config.train.steps else section.sequences
    if engine.tokens < running * length:
        raised = ["it"] if key == "kv_cache_gib" or value < HIGHEST_UTILIZATION else []
        raised += ["rollout.tp"] if any(larger_engines(config, shape)) else []
        remedy = f"Raise {' or '.join(raised)}, or lower" if raised else "Lower"
        yield (
            f"rollout.{key}: {value} leaves a KV cache for {engine.tokens // length} of {running} sequences of full "
            f"length; if responses grow that long, others wait. {remedy} rollout.max_num_seqs"
        )


def check_network(
    config: RunConfig, shape: ModelDescription, gpu: Gpu | None, efficiency: EfficiencySection
) -> Iterator[str]:
    """Warns if engines exchange activations over the network, with the cost on a known GPU."""
    tp, ranks = config.rollout.tp, config.resources.ranks_per_node
    if tp <= ranks or (gpu is not None and tp <= linked_ranks(ranks, gpu)):
        return
    what = f"rollout.tp: engines of {tp} ranks are on {tp // ranks} nodes each, and every token crosses the network"
    if gpu is None or not config.train.steps or not isinstance(shape, ModelShape):
        yield f"{what}; set it to {ranks} at most if the model fits there"
        return
    predicted: dict[int, float] = {}
    for size in (tp, *divisors(ranks)):
        tried = config.model_copy(update={"rollout": config.rollout.model_copy(update={"tp": size})})
        with suppress(UserError):
            check_engine(shape, tried.rollout)
            ranks = generating_ranks(config, config.world_size)
            phase = predict_rollout(tried, shape, ranks, gpu, efficiency) if ranks % size == 0 else None
            if phase is not None:
                predicted[size] = phase.seconds
    here, best = predicted.pop(tp, None), min(predicted, key=predicted.__getitem__, default=None)
    if best is None:
        yield f"{what}; no engine on one node of {gpu.name} holds the model: take nodes with the fastest network"
    elif here is None or predicted[best] < here:
        instead = "" if here is None else f" instead of {here:,.0f} s"
        yield f"{what}; set it to {best}, with which a rollout is predicted to take {predicted[best]:,.0f} s{instead}"


def check_tensor_parallel(config: RunConfig, gpu: Gpu | None) -> Iterator[str]:
    """Warns if ranks that exchange activations in every layer are on several nodes."""
    ranks = config.resources.ranks_per_node
    sections = {"actor.parallel": config.actor.parallel, "critic.parallel": config.critic.parallel}
    sections["reference.parallel"] = config.reference.parallel
    if config.reward_model is not None:
        sections[f"{config.reward_model_key}.parallel"] = config.reward_model.parallel
    linked = linked_ranks(ranks, gpu)
    given = {key: section for key, section in sections.items() if section is not None}
    for key, axis in product(given, _INSIDE):
        size = getattr(given[key], axis)
        beside = ranks % size == 0 or size <= linked > ranks
        if config.world_size > ranks and not beside:
            yield (
                f"{key}.{axis}: activations of every layer cross the network between {size} ranks on nodes of {ranks}; "
                f"use one of {divisors(ranks)}, and pp for the rest"
            )


def check_cpu_memory(config: RunConfig, plan: MemoryPlan, gpu: Gpu | None) -> Iterator[str]:
    """Warns if a node's ranks need more CPU memory than the job or the node has."""
    limit = cpu_memory_limit(config, gpu)
    if limit is not None and plan.cpu.node > limit[1]:
        yield (
            f"{limit[0]}: ranks need about {plan.cpu.node / GIB:,.0f} GiB of a node's memory, which has "
            f"{limit[1] / GIB:,.0f}; raise it, take more nodes or offload less (actor.memory.offload, "
            "actor.optimizer.optimizer_offload_fraction)"
        )


def check_disk(config: RunConfig, shape: ModelDescription) -> Iterator[str]:
    """Refuses a disk too small for one checkpoint and its export; warns if it cannot hold all that are kept and one
    more."""
    if config.evaluates_only:
        return
    folder = next(path for path in (config.folder.absolute(), *config.folder.absolute().parents) if path.exists())
    one, free = checkpoint_bytes(config, shape), shutil.disk_usage(folder).free
    export, exports = export_bytes(config, shape), kept_exports(config)
    if free < one + export:
        what = "a checkpoint and its export take" if export else "a checkpoint takes"
        raise UserError(
            f"{what} {_size(one + export)}, the disk of {str(folder)!r} has {_size(free)} free",
            where="run_dir",
            remedy="choose a folder on another disk, or make room",
        )
    best = config.checkpoint.keep_best is not None
    wanted = (config.checkpoint.keep + best + 1) * one + exports * export
    if free < wanted and not _has_checkpoints(config.folder):
        yield (
            f"checkpoint.keep: {config.checkpoint.keep} checkpoints{', the best one' if best else ''} "
            f"and the one being written{f', with {exports} export(s),' if exports else ''} take {_size(wanted)}, "
            f"the disk of {str(folder)!r} has {_size(free)} free; lower it or make room"
        )


def _has_checkpoints(folder: Path) -> bool:
    """Whether an earlier attempt's checkpoints already take part of the disk."""
    return (folder / "checkpoints").is_dir()


def _size(size: float) -> str:
    return f"{size / GIB:,.1f} GiB"
