"""Configurations that tests make of a few sections."""

from __future__ import annotations

from typing import Any

from rlhpc.config.schema import RunConfig


def least_config(**sections: Any) -> RunConfig:
    """Sections beside the keys that every configuration needs; ``train`` has one step."""
    train = {"steps": 1, **sections.pop("train", {})}
    return RunConfig.model_validate({"name": "x", "model": {"path": "m"}, "train": train, **sections})
