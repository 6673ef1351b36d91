"""Checks of runs that go on without engines which are lost."""

from __future__ import annotations

from collections.abc import Iterator

from rlhpc.config.schema import RunConfig
from rlhpc.core.errors import UserError
from rlhpc.sharding.placement import Placement

_KEY = "recovery.lost_engines"
_BACK = "set it to restart"


def lost_engine_faults(config: RunConfig) -> Iterator[UserError]:
    """Settings with which an engine cannot be lost alone."""
    if config.recovery.lost_engines != "rejoin":
        return
    if config.placement != "separate":
        yield UserError(
            f"rejoin, but with placement {config.placement} trainers' ranks have engines too",
            where=_KEY,
            remedy=f"{_BACK}, or placement to separate",
        )
    on_engines = {"reference.on": config.reference_on}
    if config.reward_model is not None:
        on_engines[f"{config.reward_model_key}.on"] = config.reward_model_on
    for key, where in on_engines.items():
        if where == "engines":
            yield UserError(
                f"engines, but these may be lost ({_KEY} rejoin) with groups that the model has not scored yet",
                where=key,
                remedy=f"set it to trainers or judges, or {_KEY} to restart",
            )


def check_lost_engines(config: RunConfig, placement: Placement) -> None:
    """Refuses a split in which an engine's ranks have no block of their own."""
    first, tp = placement.engines.first, placement.tp
    if config.may_lose_engines and first % tp:
        raise UserError(
            f"{tp} does not divide the {first} ranks before the engines, which may be lost one by one ({_KEY} rejoin)",
            where="rollout.tp",
            remedy=f"use a divisor of {first}, or set {_KEY} to restart",
        )
