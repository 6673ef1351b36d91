"""Where a run would stop after hours: lengths, the KV cache, checkpoints' disk, memory. Refused, or told as a warning.

Warnings are lines that name key, value and remedy.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from math import prod
from pathlib import Path

from rlhpc.config.schema import RunConfig
from rlhpc.core.errors import UserError
from rlhpc.models import ModelShape
from rlhpc.plan.critic import WITH_CRITIC
from rlhpc.plan.hardware import named_gpu, read_site
from rlhpc.plan.layout import ParallelLayout
from rlhpc.plan.memory import GIB, engine_memory, predict_memory, sequence_tokens
from rlhpc.plan.optimizer_memory import ITEMSIZE
from rlhpc.plan.shards import model_tensors

_STRETCHED = ("yarn", "linear")  # scalings that vLLM takes a model's positions times the factor for
_STATE = 12  # bytes of master weight and moments for each parameter


def foresee(config: RunConfig, shape: ModelShape, layout: ParallelLayout, prepared: bool = True) -> list[str]:
    """Warnings of everything below; raises UserError for what cannot work.

    ``prepared`` false: models that judge beside the actor may still be absent.
    """
    gpu = named_gpu(config, read_site(config))
    gib = gpu.memory_gib if gpu else None
    warnings = [*check_lengths(config, shape), *check_cache(config, shape, gib), *check_disk(config, shape)]
    if gib is not None and prepared:
        plan = predict_memory(config, shape, layout, gib)
        if (phase := plan.first_too_large) is not None:
            warnings.append(
                f"memory: {phase.name} needs about {phase.total / GIB:,.0f} GiB on rank {plan.rank}, a GPU has "
                f"{gib:g}; `rlhpc plan` says what helps"
            )
    return warnings


def check_lengths(config: RunConfig, shape: ModelShape) -> Iterator[str]:
    """Prompts with their responses are no longer than positions and rotary scaling allow."""
    if not config.train.steps and not config.data.validation:
        return
    prompt, response = config.data.max_prompt_tokens, config.rollout.max_response_tokens
    limit = usable_positions(shape)
    if prompt + response > limit:
        scaled = f", {limit} with its rope scaling" if limit > shape.max_positions else ""
        raise UserError(
            f"{response} response tokens after data.max_prompt_tokens {prompt} exceed the model's "
            f"{shape.max_positions} positions (max_position_embeddings{scaled})",
            where="rollout.max_response_tokens",
            remedy=f"lower them to {limit} together",
        )
    if prompt + response > shape.max_positions:
        yield (
            f"rollout.max_response_tokens: {response} after prompts of {prompt} are more than the model's "
            f"{shape.max_positions} positions, which only its rope scaling ({shape.rope.kind}) reaches; lower them if "
            "it was never trained so"
        )


def usable_positions(shape: ModelShape) -> int:
    """Positions that the engine takes: under these scalings, those of the original length times the factor."""
    if shape.rope.kind not in _STRETCHED:
        return shape.max_positions
    original = int(shape.rope.parameters.get("original_max_position_embeddings") or shape.max_positions)
    return max(shape.max_positions, int(original * float(shape.rope.parameters["factor"])))


def check_cache(config: RunConfig, shape: ModelShape, gpu_gib: float | None) -> Iterator[str]:
    """The KV cache holds one whole sequence, or nothing can be generated; a warning where not all that run at once."""
    section = config.rollout
    if not config.train.steps and not config.data.validation:
        return
    if section.kv_cache_gib is None and gpu_gib is None:
        return
    engine = engine_memory(config, shape, None if gpu_gib is None else int(gpu_gib * GIB))
    own = section.kv_cache_gib is not None
    key, value = ("kv_cache_gib", section.kv_cache_gib) if own else ("gpu_memory_fraction", section.gpu_memory_fraction)
    length = sequence_tokens(config)
    if engine.tokens < length:
        short = length * engine.token - max(0, engine.cache)
        raise UserError(
            f"{value} leaves a KV cache of {max(0, engine.tokens):,} tokens, a prompt with its response has {length:,}",
            where=f"rollout.{key}",
            remedy=f"raise it by {short / GIB if own else short / GIB / (gpu_gib or 1):.2f}, raise rollout.tp or lower "
            "rollout.max_response_tokens",
        )
    engines = max(1, config.world_size // section.tp)
    samples = -(-config.train.prompts_per_step * section.samples_per_prompt // engines)
    running = min(section.max_running, samples) if config.train.steps else section.max_running
    if engine.tokens < running * length:
        yield (
            f"rollout.{key}: {value} leaves a KV cache for {engine.tokens // length} of {running} sequences of full "
            f"length; if responses grow that long, others wait. Raise it or rollout.tp, or lower rollout.max_running"
        )


def checkpoint_bytes(config: RunConfig, shape: ModelShape) -> int:
    """Of one checkpoint on disk: weights, master weights and moments of all that is trained."""
    each = ITEMSIZE[config.model.dtype] + _STATE
    numel = sum(prod(tensor.shape) for tensor in model_tensors(shape))
    critic = config.train.steps > 0 and config.algorithm.name in WITH_CRITIC
    reference = config.sft is not None and config.train.steps > 0 and config.algorithm.kl.coefficient > 0
    return numel * (each * (1 + critic) + ITEMSIZE[config.model.dtype] * reference)


def check_disk(config: RunConfig, shape: ModelShape) -> Iterator[str]:
    """Room for one checkpoint, and a warning where not for all that are kept beside the one being written."""
    if config.evaluates_only:
        return
    folder = next(path for path in (config.folder.absolute(), *config.folder.absolute().parents) if path.exists())
    one, free = checkpoint_bytes(config, shape), shutil.disk_usage(folder).free
    if free < one:
        raise UserError(
            f"a checkpoint takes {_size(one)}, the disk of {str(folder)!r} has {_size(free)} free",
            where="run_dir",
            remedy="choose a folder on another disk, or make room",
        )
    wanted = config.checkpoint.keep + 1
    if free < wanted * one and not _has_checkpoints(config.folder):
        yield (
            f"checkpoint.keep: {config.checkpoint.keep} checkpoints and the one being written take "
            f"{_size(wanted * one)}, the disk of {str(folder)!r} has {_size(free)} free; lower it or make room"
        )


def _has_checkpoints(folder: Path) -> bool:
    """Of an earlier start, which take part of the room already."""
    return (folder / "checkpoints").is_dir()


def check_walltime(config: RunConfig, limit_seconds: int | None, step_seconds: float) -> Iterator[str]:
    """Steps that are foretold to take so long, against the job's time limit. Raises UserError where none fits in."""
    steps = config.train.steps
    if limit_seconds is None or not steps:
        return
    if step_seconds > limit_seconds:
        raise UserError(
            f"a step is foretold to take {step_seconds:,.0f} s, the job has {limit_seconds:,} s",
            where="slurm.time",
            remedy="raise it, take more nodes or lower train.prompts_per_step",
        )
    if steps * step_seconds > limit_seconds:
        jobs = -(-steps // max(1, int(limit_seconds // step_seconds)))
        yield (
            f"slurm.time: {steps} steps of {step_seconds:,.0f} s are foretold to take "
            f"{steps * step_seconds / 3600:,.1f} hours, {jobs} jobs of the limit: the run saves in time and is requeued"
        )


def _size(size: float) -> str:
    return f"{size / GIB:,.1f} GiB"
