"""Checks speculative decoding (docs/sampling.md); heads: ``heads``."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from rlhpc.checkpoint.formats.model_folder import check_weights
from rlhpc.checkpoint.formats.torch_dist_metadata import is_torch_dist
from rlhpc.checkpoint.formats.weight_table import is_sharded
from rlhpc.config.rollout import GUESSERS, SpeculativeSection
from rlhpc.config.schema import RunConfig
from rlhpc.core.errors import UserError
from rlhpc.models import ModelDescription, ModelShape
from rlhpc.plan.checks.engine_arguments import engine_fields
from rlhpc.plan.checks.heads import head_faults, mtp_faults
from rlhpc.plan.checks.parallelism import check_engine
from rlhpc.plan.checks.sampling import resolved_sections
from rlhpc.plan.estimates.draft_model import draft_shape
from rlhpc.plan.estimates.memory import sequence_tokens

_WHERE = "rollout.speculative"
_MODEL = f"{_WHERE}.model"
_KEYS = {
    "method": "method",
    "model": "model",
    "num_speculative_tokens": "tokens",
    "prompt_lookup_min": "min_match",
    "prompt_lookup_max": "max_match",
}
_MODELS = ("draft_model_config", "draft_tensor_parallel_size", "draft_load_config", "use_heterogeneous_vocab")
_OWN = ("rejection_sample_method", "draft_sample_method", "synthetic_acceptance_rates", "disable_padded_drafter_batch")


def speculative_faults(config: RunConfig) -> Iterator[UserError]:
    """What vLLM refuses with guesses, and methods whose order of generation could not be repeated."""
    section = config.rollout.speculative
    if section is None:
        return
    for where, sampling in resolved_sections(config):
        for name in ("min_p", "logit_bias"):
            given = getattr(sampling, name)
            inherited = where != "rollout.sampling" and given == getattr(config.rollout.sampling, name)
            if given and not inherited:
                yield UserError(
                    "vLLM does not take it with rollout.speculative", where=f"{where}.{name}", remedy="leave out one"
                )
    yield from _argument_faults(section)
    if section.method == "ngram" and section.min_match > section.max_match:
        yield UserError(
            f"{section.min_match} is above max_match, {section.max_match}",
            where=f"{_WHERE}.min_match",
            remedy="lower it",
        )
    yield from _model_faults(section)
    if section.by_network and config.rollout.engine.get("async_scheduling"):
        yield UserError(
            "guesses of a model need each step's tokens before the next step",
            where="rollout.engine.async_scheduling",
            remedy="leave it out",
        )
    package = GUESSERS.get(section.method)
    here = engine_fields() is not None and not config.slurm.other_python
    if here and package is not None and find_spec(package) is None:
        yield UserError(
            f"{section.method} needs the package {package}, which is not installed beside vLLM",
            where=f"{_WHERE}.method",
            remedy="install it, or choose another method",
        )
    if section.method == "suffix" and (order := _order(config)):
        yield UserError(
            f"what suffix guesses depends on all that an engine has answered, and {order} follows the engine's steps:"
            " a run that goes on would not equal one that was not stopped",
            where=f"{_WHERE}.method",
            remedy="use ngram",
        )


def draft_faults(config: RunConfig, policy: ModelDescription, *, weights: bool = True) -> Iterator[UserError]:
    """What keeps a second model or a head from guessing the policy's tokens; ``_model_faults`` refuses a wrong path.
    ``weights``: its files are on this machine."""
    section = config.rollout.speculative
    if section is not None and section.method == "mtp":
        yield from mtp_faults(config.model.path, policy, weights=weights)
    if section is None or section.model is None or not (section.model / "config.json").is_file():
        return
    if section.method != "draft_model":
        yield from head_faults(config.rollout, policy, weights=weights)
        return
    shape = draft_shape(config.rollout)
    assert shape is not None
    if shape.experts is not None or shape.latent is not None:
        yield UserError("guesses are those of a dense model", where=_MODEL, remedy="use a small dense model")
        return
    if shape.vocab_size != policy.vocab_size:
        yield UserError(
            f"a vocabulary of {shape.vocab_size}, the policy's has {policy.vocab_size}",
            where=_MODEL,
            remedy="use a model of the same family: both read the same tokens",
        )
    if sequence_tokens(config) > shape.usable_positions:
        yield UserError(
            f"{shape.usable_positions} positions, but a prompt with its response has up to {sequence_tokens(config)}",
            where=_MODEL,
            remedy="use a model with more, or lower rollout.max_response_tokens",
        )
    try:
        check_engine(shape, config.rollout)
    except UserError as error:
        yield UserError(f"the second model: {error.message}", where=error.where, remedy=error.remedy)
    if weights:
        yield from _weights_faults(section.model, shape)


def _weights_faults(folder: Path, shape: ModelShape) -> Iterator[UserError]:
    """The first fault of the second model's files; it is loaded from safetensors alone."""
    try:
        if is_sharded(folder) or is_torch_dist(folder):
            raise UserError("a checkpoint", where=str(folder), remedy="export it to safetensors")
        check_weights(folder, shape)
    except UserError as error:
        yield error


def _model_faults(section: SpeculativeSection) -> Iterator[UserError]:
    """A second model or head without the method, or the method without one."""
    if section.method not in ("draft_model", "eagle", "eagle3"):
        if section.model is not None:
            remedy = "set method to draft_model, eagle or eagle3, or leave out the model"
            yield UserError(f"{section.method} guesses without a model", where=_MODEL, remedy=remedy)
    elif section.model is None:
        what = "a second model" if section.method == "draft_model" else "a head"
        yield UserError(f"{section.method} needs {what}", where=_MODEL, remedy="set it to the model's folder")
    elif not (section.model / "config.json").is_file():
        yield UserError(f"no config.json in {str(section.model)!r}", where=_MODEL, remedy="correct the path")


def _argument_faults(section: SpeculativeSection) -> Iterator[UserError]:
    for name in section.arguments:
        where = f"{_WHERE}.arguments.{name}"
        if name in _KEYS:
            yield UserError("set by another key", where=where, remedy=f"set {_WHERE}.{_KEYS[name]}")
        elif name in _MODELS:
            yield UserError(
                "a second model is loaded as the policy is, and reads its tokens", where=where, remedy="leave it out"
            )
        elif name in _OWN:
            yield UserError("the toolkit decides which guesses are right", where=where, remedy="leave it out")


def _order(config: RunConfig) -> str | None:
    """The key by which it depends on the steps of engines which responses a step has."""
    if config.placement in ("separate", "lend") and config.asynchrony.schedule == "deterministic":
        return "asynchrony.schedule: deterministic"
    dynamic = config.train.dynamic_sampling
    return "train.dynamic_sampling.oversample" if dynamic is not None and dynamic.oversample > 1 else None
