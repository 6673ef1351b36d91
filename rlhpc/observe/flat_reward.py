"""Notices a reward that gives the policy nothing to learn from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhpc.core.records import number

FLAT_STEPS = 10


class FlatReward:
    """Counts consecutive RL steps without a reward difference that gives an advantage."""

    def __init__(self) -> None:
        self._steps, self._warned = 0, False

    def add(self, record: Mapping[str, Any]) -> str:
        """Takes the metrics of the next step; returns a warning after ``FLAT_STEPS`` such steps, once, else ""."""
        if record.get("phase") != "rl" or not record.get("step"):  # 0: the first validation
            return ""
        self._steps = self._steps + 1 if _is_flat(record) else 0
        if self._steps < FLAT_STEPS or self._warned:
            return ""
        self._warned = True
        return (
            f"no response had an advantage in {FLAT_STEPS} steps, because rewards do not differ: the policy learns "
            "nothing from them; see docs/reward_does_not_rise.md"
        )


def _is_flat(record: Mapping[str, Any]) -> bool:
    """Whether no sample has an advantage, all rewards are equal, or dynamic sampling has dropped every group."""
    if record.get("reward/mean") is None:
        return record.get("sampling/kept_groups") == 0 and (number(record.get("sampling/dropped_groups")) or 0) > 0
    most, least = number(record.get("reward/max")), number(record.get("reward/min"))
    return record.get("advantage/zero_fraction") == 1 or (most is not None and most == least)
