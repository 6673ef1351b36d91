"""Checks of the section profile."""

from __future__ import annotations

from rlhpc.config.schema import RunConfig
from rlhpc.core.errors import Faults, UserError
from rlhpc.core.profiles import EVERY


def check_profile(config: RunConfig) -> None:
    """Refuses steps that the run does not have, ranks that it cannot have, and GPU tools on nodes without GPUs."""
    section, steps, faults = config.profile, last_step(config), Faults()
    with faults.collect():
        for selection in section.selections:
            if selection.last > steps:
                key = "train.steps" if config.train.steps else "sft.steps"
                raise UserError(
                    f"step {selection.last} is after the last one, {key} {steps}",
                    where="profile.steps",
                    remedy=f"use steps up to {steps}",
                )
    with faults.collect():
        for part in section.rank_ranges:
            if part != EVERY and part.last >= config.world_size:
                raise UserError(
                    f"no rank {part.last}: the run has {config.world_size}",
                    where="profile.ranks",
                    remedy=f"use ranks up to {config.world_size - 1}, or [all]",
                )
    faults.raise_all()


def last_step(config: RunConfig) -> int:
    """The last step that can be profiled: of RL, or of the warm-up if there is no RL."""
    return config.train.steps or (config.sft.steps if config.sft else 0)
