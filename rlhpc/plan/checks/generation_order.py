"""Checks of the order in which engines generate, and of a replay of it."""

from __future__ import annotations

from collections.abc import Iterator

from rlhpc.config.schema import RunConfig
from rlhpc.core.errors import UserError


def order_faults(config: RunConfig) -> Iterator[UserError]:
    """Settings that the order of arrival excludes, and those of a replay."""
    section = config.asynchrony
    if section.schedule == "arrival" and config.placement == "lend":
        yield UserError(
            "arrival, but trainers' ranks return requests at a virtual time (placement lend)",
            where="asynchrony.schedule",
            remedy="set it to deterministic, or placement to separate",
        )
    if section.replay is None:
        return
    if section.in_flight == "keep":
        yield UserError(
            "keep, but a kept KV cache depends on the steps at which the recorded run saved",
            where="asynchrony.in_flight",
            remedy="replay runs with recompute or finish only",
        )
