"""Checks of reference and reward model that engines have beside them."""

from __future__ import annotations

from collections.abc import Iterator

from rlhpc.checkpoint.formats.described import resolve_value_model
from rlhpc.config.model_settings import beside_engine, reference_settings, reward_model_settings
from rlhpc.config.schema import RunConfig
from rlhpc.core.errors import Faults, UserError
from rlhpc.models import ModelDescription, ModelShape
from rlhpc.plan.checks.parallelism import misfits
from rlhpc.sharding.layout import divisors, make_layout
from rlhpc.sharding.placement import backend_for

_BACK = "set it to trainers"


def check_beside_engines(config: RunConfig) -> None:
    """Refuses models on engines where these cannot have them, and layouts that they do not use."""
    Faults(_faults(config)).raise_all()


def check_shapes_beside_engines(config: RunConfig, shape: ModelDescription | None) -> None:
    """Refuses models that rollout.tp does not divide. ``shape``: the actor's, if known. Needs a reward model's
    config.json."""
    if backend_for(config, shape) == "fsdp":  # cuts no tensor by heads
        return
    faults = Faults()
    if shape is not None and config.reference_on == "engines" and config.algorithm.kl.coefficient > 0:
        with faults.collect():
            _check_shape(config, "the reference", "reference.on", shape)
    if config.reward_model is not None and config.reward_model_on == "engines":
        key = f"{config.reward_model_key}.on"
        with faults.collect():
            _check_shape(config, "the reward model", key, resolve_value_model(config, config.reward_model.model))
    faults.raise_all()


def _faults(config: RunConfig) -> Iterator[UserError]:
    model = config.reward_model
    on_engines = {"reference.on": config.reference.on == "engines"}
    if model is not None:
        on_engines[f"{config.reward_model_key}.on"] = model.on == "engines"
    for key, selected in on_engines.items():
        if selected and config.train.steps and config.placement != "colocated" and config.train.replay is not None:
            yield UserError(
                "engines score groups once, and replayed ones are scored again in each step (train.replay)",
                where=key,
                remedy=f"{_BACK}, or leave train.replay out",
            )
    if config.reference_on == "engines" and config.sft is not None and config.algorithm.kl.coefficient > 0:
        yield UserError(
            "engines, but after a supervised warm-up (sft) the reference is the policy that only trainers have then",
            where="reference.on",
            remedy=f"{_BACK}, or name a model that is warmed up in model.path and leave sft out",
        )
    if model is not None and model.parallel is not None and model.on == "engines":
        key = config.reward_model_key
        yield UserError(
            "on engines the model is divided among the ranks of each (rollout.tp)",
            where=f"{key}.parallel",
            remedy=f"leave it out, or set {key}.on to judges",
        )


def _check_shape(config: RunConfig, name: str, key: str, shape: ModelDescription) -> None:
    frozen = reference_settings(config) if key == "reference.on" else reward_model_settings(config)

    def wrong(tp: int) -> str | None:
        parallel = beside_engine(frozen, tp, experts=shape.experts is not None).parallel
        assert isinstance(shape, ModelShape), "megatron computes known families"
        found = next(misfits(shape, make_layout(parallel, tp), parallel), None)
        return None if found is None else found.message

    message = wrong(config.rollout.tp)
    if message is not None:
        valid = [size for size in divisors(shape.num_heads) if wrong(size) is None]
        raise UserError(
            f"{name}: {message}", where="rollout.tp", remedy=f"use one of {valid}, or set {key} to trainers"
        )
