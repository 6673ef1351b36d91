"""Which functions score a response, as far as the config alone can tell what is wrong with that."""

from __future__ import annotations

from collections import Counter

from rlhpc.config.reward import RewardSection
from rlhpc.core.errors import UserError


def check_reward(section: RewardSection) -> None:
    """Refuse a config that names functions in two ways, or two of them alike."""
    if section.functions and (section.function is not None or section.arguments):
        key = "function" if section.function is not None else "arguments"
        raise UserError(
            f"reward.{key} is given too", where="reward.functions", remedy=f"make it an item of the list, without {key}"
        )
    twice = [name for name, count in Counter(item.name for item in section.functions).items() if count > 1]
    if twice:
        raise UserError(f"{twice[0]!r} is the name of two", where="reward.functions", remedy="name each differently")
