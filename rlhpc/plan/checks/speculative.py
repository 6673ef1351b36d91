"""Checks speculative decoding (docs/speculative.md)."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from rlhpc.config.rollout import GUESSERS, SpeculativeSection
from rlhpc.config.schema import RunConfig
from rlhpc.core.errors import UserError
from rlhpc.plan.checks.engine_arguments import engine_fields
from rlhpc.plan.checks.sampling import resolved_sections

_WHERE = "rollout.speculative"
_KEYS = {
    "method": "method",
    "num_speculative_tokens": "tokens",
    "prompt_lookup_min": "shortest_match",
    "prompt_lookup_max": "longest_match",
}
_MODELS = ("model", "draft_model_config", "draft_tensor_parallel_size")
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
    if section.method == "ngram" and section.shortest_match > section.longest_match:
        yield UserError(
            f"{section.shortest_match} is above longest_match, {section.longest_match}",
            where=f"{_WHERE}.shortest_match",
            remedy="lower it",
        )
    package = GUESSERS[section.method]
    here = engine_fields() is not None and not config.slurm.other_python
    if here and find_spec(package) is None:
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


def _argument_faults(section: SpeculativeSection) -> Iterator[UserError]:
    for name in section.arguments:
        where = f"{_WHERE}.arguments.{name}"
        if name in _KEYS:
            yield UserError("set by another key", where=where, remedy=f"set {_WHERE}.{_KEYS[name]}")
        elif name in _MODELS:
            yield UserError("guesses by a second model are not supported", where=where, remedy="leave it out")
        elif name in _OWN:
            yield UserError("the toolkit decides which guesses are right", where=where, remedy="leave it out")


def _order(config: RunConfig) -> str | None:
    """The key by which it depends on the steps of engines which responses a step has."""
    if config.placement in ("separate", "lend") and config.asynchrony.schedule == "deterministic":
        return "asynchrony.schedule: deterministic"
    dynamic = config.train.dynamic_sampling
    return "train.dynamic_sampling.oversample" if dynamic is not None and dynamic.oversample > 1 else None
