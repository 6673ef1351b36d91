"""Checks of sampling (docs/sampling.md), and warnings where the sampled policy is not the trained one."""

from __future__ import annotations

from collections.abc import Iterator

from rlhpc.config.rollout import MAX_KEPT, ResolvedSampling, SamplingSection
from rlhpc.config.schema import RunConfig
from rlhpc.core.errors import UserError
from rlhpc.models import ModelDescription
from rlhpc.plan.checks.placement import separates

MAX_TEMPERATURE = 2.0  # vllm/sampling_params.py, _verify_args


def sampling_faults(config: RunConfig) -> Iterator[UserError]:
    """Options that contradict others."""
    rollout = config.rollout
    for where, temperature in (("rollout", rollout.temperature), ("validation", config.validation.temperature)):
        if temperature > MAX_TEMPERATURE:
            yield UserError(
                f"{temperature:g} is above {MAX_TEMPERATURE:g}, vLLM's maximum",
                where=f"{where}.temperature",
                remedy="lower it",
            )
    for where, section in resolved_sections(config):
        if section.min_tokens > rollout.max_response_tokens:
            yield UserError(
                f"{section.min_tokens} is above rollout.max_response_tokens, {rollout.max_response_tokens}",
                where=f"{where}.min_tokens",
                remedy="lower it",
            )
        form = section.structured_output
        if form is not None and len(form.given) != 1:
            names = ", ".join(type(form).model_fields)
            yield UserError(
                f"{' and '.join(form.given) or 'nothing'} is given",
                where=f"{where}.structured_output",
                remedy=f"give one of {names}",
            )
        if rollout.tools and section.stop and not section.train_on_stop:
            yield UserError(
                "a text that ends a turn before a tool's answer is part of the call",
                where=f"{where}.train_on_stop",
                remedy="set it to true, or use no tools",
            )


def vocabulary_faults(config: RunConfig, shape: ModelDescription) -> Iterator[UserError]:
    """Token ids that the model does not have."""
    for where, section in resolved_sections(config):
        for name, tokens in (("stop_token_ids", section.stop_token_ids), ("logit_bias", section.logit_bias)):
            beyond = [token for token in tokens if token >= shape.vocab_size]
            if beyond:
                yield UserError(
                    f"{beyond[0]} is no token of a vocabulary of {shape.vocab_size}",
                    where=f"{where}.{name}",
                    remedy=f"use ids from 0 to {shape.vocab_size - 1}",
                )


def sampling_warnings(config: RunConfig) -> Iterator[str]:
    """Yields one warning for each key by which the sampled distribution is not the trained one."""
    rollout = config.rollout
    seen = set()
    for source in (None, *rollout.sampling_by_source):
        sampling = rollout.sampling_of(source)
        for name in (*sampling.cuts, *sampling.shifts):
            key = _key(config, source, name)
            if key not in seen:
                seen.add(key)
                yield f"{key}: {_difference(sampling, name)}, and engine and trainer are not compared; {_remedy(name)}"


def _difference(sampling: ResolvedSampling, name: str) -> str:
    value = getattr(sampling, name)
    shown = f"{value:g} " if isinstance(value, int | float) else ""
    if name in sampling.cuts:
        return f"{shown}samples from a truncated distribution, but the loss trains the whole one"
    return f"{shown}samples from another distribution than the one that the loss trains"


def _remedy(name: str) -> str:
    if name == "top_k":
        return f"set it to at most {MAX_KEPT}, so that the loss trains the same tokens, or watch the metric mismatch_k1"
    if name in ("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias"):
        return "leave it out, or watch the metric mismatch_k1"
    same = "so that the loss trains the same tokens, or watch the metric mismatch_k1"
    return f"set rollout.sampling.top_k to at most {MAX_KEPT}, {same}"


def _key(config: RunConfig, source: str | None, name: str) -> str:
    """The key that sets an option for a data source."""
    own = config.rollout.sampling_by_source.get(source or "")
    if own is not None and name in own.given:
        return f"rollout.sampling_by_source.{source}.{name}"
    return f"rollout.{name}" if name == "top_p" else f"rollout.sampling.{name}"


def resolved_sections(config: RunConfig) -> Iterator[tuple[str, SamplingSection]]:
    """Each resolved sampling, with a key that it comes from."""
    yield "rollout.sampling", config.rollout.sampling_of(None)
    for source in config.rollout.sampling_by_source:
        yield f"rollout.sampling_by_source.{source}", config.rollout.sampling_of(source)
    yield "validation.sampling", config.rollout.sampling_of(None, config.validation.sampling)


def off_policy_warnings(config: RunConfig) -> Iterator[str]:
    """Yields one warning for each key that makes the sampled policy another than the trained one."""
    if not config.train.steps:
        return
    yield from sampling_warnings(config)
    if config.algorithm.rollout_correction.method != "none":
        return
    dynamic = config.train.dynamic_sampling
    older = {
        "train.replay": config.train.replay is not None,
        "train.dynamic_sampling.oversample": dynamic is not None and dynamic.oversample > 1,
        "asynchrony.max_staleness": separates(config) and config.asynchrony.max_staleness > 0,
    }
    for key in (key for key, used in older.items() if used):
        yield (
            f"{key}: trains on tokens of older policies as if the present one had sampled them; set "
            "algorithm.rollout_correction.method to truncate"
        )
