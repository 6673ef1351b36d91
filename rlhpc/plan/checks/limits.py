"""Checks of limits that a run would hit after hours: lengths, KV cache, disk, memory. Refuses, or warns.

Warnings are lines with key, value and remedy.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from math import ceil
from pathlib import Path

from rlhpc.config.rollout import RolloutSection
from rlhpc.config.schema import RunConfig
from rlhpc.config.site import EfficiencySection
from rlhpc.core.errors import Faults, UserError
from rlhpc.models import ModelDescription, ModelShape, has_dynamic_rope, read_config
from rlhpc.plan.checks.parallelism import check_engine
from rlhpc.plan.estimates.fsdp_parameters import is_plannable
from rlhpc.plan.estimates.hardware import Gpu, cpu_memory_limit, linked_ranks, named_gpu, read_site
from rlhpc.plan.estimates.memory import (
    GIB,
    EngineMemory,
    MemoryPlan,
    engine_bytes,
    engine_memory,
    predict_memory,
    sequence_tokens,
)
from rlhpc.plan.estimates.run_time import checkpoint_bytes, export_bytes, kept_exports
from rlhpc.plan.estimates.step_time import predict_rollout
from rlhpc.sharding.engine_shards import fits_nodes
from rlhpc.sharding.layout import ParallelLayout, divisors
from rlhpc.sharding.placement import engine_ranks, generating_ranks

HIGHEST_UTILIZATION = 0.95  # of a GPU: its CUDA context and the sleeping trainer need the rest
_MORE_GPUS = (2, 4, 8, 16, 32, 64)
_LEAST_RESPONSE = 0.25  # a shorter response than this part of the configured one is another task


def cache_key(section: RolloutSection) -> str:
    """The key in ``rollout`` that sets the size of the cache."""
    return "gpu_memory_utilization" if section.kv_cache_gib is None else "kv_cache_gib"


def cache_size(section: RolloutSection) -> float:
    """The value of that key."""
    return float(getattr(section, cache_key(section)))


def holds_sequence(config: RunConfig, shape: ModelDescription, gpu_gib: float | None) -> bool:
    """True if the cache holds the longest prompt with the longest response; true where its size is not known."""
    if (config.rollout.kv_cache_gib is None and gpu_gib is None) or not generates(config):
        return True
    return _Cache(config, shape, gpu_gib).engine(config.rollout).tokens >= sequence_tokens(config)


def generates(config: RunConfig) -> bool:
    """True if the run samples responses at all."""
    return bool(config.train.steps or config.data.validation)


def larger_engines(config: RunConfig, shape: ModelDescription) -> Iterator[int]:
    """Larger tensor-parallel sizes that suit model, ranks and nodes, the smallest first."""
    for size in divisors(generating_ranks(config, config.world_size)):
        if size > config.rollout.tp and fits_nodes(size, config.resources.ranks_per_node):
            with suppress(UserError):
                check_engine(shape, config.rollout.model_copy(update={"tp": size}))
                yield size


def cache_remedy(config: RunConfig, shape: ModelDescription, gpu_gib: float | None) -> str:
    """Changes with which the cache holds a whole sequence, joined by "or"; more or larger GPUs if there are none."""
    cache, section = _Cache(config, shape, gpu_gib), config.rollout
    shorter = cache.response_tokens
    options = []
    if (raised := cache.enlarged(section)) is not None:
        options.append(f"set it to {cache_size(raised):g}")
    if (larger := engine_remedy(config, shape, gpu_gib, alone=raised is not None)) is not None:
        options.append(larger)
    if shorter >= _LEAST_RESPONSE * section.max_response_tokens:
        options.append(f"lower rollout.max_response_tokens to {shorter}")
    if not options:
        options.append(cache.more_gpus())
    return " or ".join([", ".join(options[:-1]), options[-1]] if options[1:] else options)


def engine_remedy(
    config: RunConfig, shape: ModelDescription, gpu_gib: float | None, *, alone: bool = False
) -> str | None:
    """The smallest larger engine whose cache holds a whole sequence, if need be and not ``alone`` with another size of
    the cache."""
    cache = _Cache(config, shape, gpu_gib)
    for size in larger_engines(config, shape):
        found = cache.working(config.rollout.model_copy(update={"tp": size}))
        if found is not None and not (alone and cache_size(found) != cache_size(config.rollout)):
            return f"set {cache.changed(found)}"
    return None


@dataclass(frozen=True)
class _Cache:
    """Engines of a run on a GPU of ``gpu_gib`` GiB, None where it is not known."""

    config: RunConfig
    shape: ModelDescription
    gpu_gib: float | None

    @property
    def _gpu_bytes(self) -> int | None:
        return None if self.gpu_gib is None else int(self.gpu_gib * GIB)

    def engine(self, section: RolloutSection) -> EngineMemory:
        return engine_bytes(section, self.shape, self.config.model.dtype, self._gpu_bytes)

    def _starts(self, section: RolloutSection) -> bool:
        """True if the claim of the engine leaves the rest of the GPU its share."""
        return self._gpu_bytes is None or self.engine(section).claimed <= HIGHEST_UTILIZATION * self._gpu_bytes

    def _holds(self, section: RolloutSection) -> bool:
        return self._starts(section) and self.engine(section).tokens >= sequence_tokens(self.config)

    def enlarged(self, section: RolloutSection) -> RolloutSection | None:
        """The section with the smallest cache that holds a sequence; None if no GPU has room for it."""
        engine, tokens = self.engine(section), sequence_tokens(self.config)
        if section.kv_cache_gib is not None:
            value = (tokens * engine.token + 1) / GIB
        else:
            value = (engine.smallest(tokens) + 1) / (self._gpu_bytes or 1)
        found = section.model_copy(update={cache_key(section): ceil(100 * value) / 100})
        return found if self._holds(found) else None

    def working(self, section: RolloutSection) -> RolloutSection | None:
        """The section itself if its cache holds a sequence, or with another size of the cache; None if none does."""
        if section.kv_cache_gib is None and section.gpu_memory_utilization > HIGHEST_UTILIZATION:
            section = section.model_copy(update={"gpu_memory_utilization": HIGHEST_UTILIZATION})
        return section if self._holds(section) else self.enlarged(section)

    def changed(self, section: RolloutSection) -> str:
        """Engine size and, if it differs, size of the cache, as keys with values."""
        size = cache_size(section)
        also = f" and rollout.{cache_key(section)} to {size:g}" if size != cache_size(self.config.rollout) else ""
        return f"rollout.tp to {section.tp}{also}"

    @property
    def response_tokens(self) -> int:
        """Longest response, after the longest prompt, that the configured cache holds; 0 without room for any."""
        section = self.config.rollout
        room = self.engine(section).tokens - self.config.data.max_prompt_tokens
        return max(0, room) if self._starts(section) else 0

    def more_gpus(self) -> str:
        """Remedy where no engine on the job's ranks is large enough."""
        for size in _MORE_GPUS:
            section = self.config.rollout.model_copy(update={"tp": size})
            if size <= max(generating_ranks(self.config, self.config.world_size), self.config.rollout.tp):
                continue
            with suppress(UserError):
                check_engine(self.shape, section)
                if (found := self.working(section)) is not None:
                    keys = "resources.ranks_per_node x slurm.nodes"
                    if engine_ranks(self.config) is not None:
                        keys = "rollout.ranks or rollout.nodes"
                    gpus = f"take at least {size} GPUs ({keys})"
                    return f"{gpus} and set {self.changed(found)}"
        if self.response_tokens:
            return f"lower rollout.max_response_tokens to {self.response_tokens}"
        return "use larger GPUs"


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
    """Part of a remedy: the key by which dynamic RoPE reaches further."""
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
    """True if an earlier attempt's checkpoints already take part of the disk."""
    return (folder / "checkpoints").is_dir()


def _size(size: float) -> str:
    return f"{size / GIB:,.1f} GiB"
