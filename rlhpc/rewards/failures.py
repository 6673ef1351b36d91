"""What becomes of a response of which a reward has failed: as ``reward.on_failure`` says, whatever kind of reward."""

from __future__ import annotations

import logging
from collections import Counter

from rlhpc.core.errors import UserError
from rlhpc.rewards.calls import Failure

_log = logging.getLogger(__name__)
_SHOWN = 80


class Failures:
    """Counts what has failed, and tells the first of each kind."""

    def __init__(self, on_failure: str, remedy: str) -> None:
        """``remedy`` is for the user whose run ends by a failure."""
        self._on_failure, self._remedy = on_failure, remedy
        self._counts: Counter[str] = Counter()
        self._told: set[tuple[str, str]] = set()

    @property
    def drops(self) -> bool:
        """A response of which a reward has failed is left out; else that reward counts as 0."""
        return self._on_failure == "drop"

    def handle(self, where: str, failure: Failure, prompt_id: int, source: str, text: str, tell: bool = True) -> None:
        """Of the reward at ``where``, for a response to a prompt; a UserError where that is to end the run."""
        self._counts[failure.kind] += 1
        told = f"{failure.what} for prompt {prompt_id} of {source!r}, response {text[:_SHOWN]!r}"
        if self._on_failure == "fail":
            raise UserError(told, where=where, remedy=self._remedy)
        if tell and (where, failure.kind) not in self._told:
            self._told.add((where, failure.kind))
            handled = {"zero": "counted as 0", "drop": "left out of training"}[self._on_failure]
            _log.warning("%s: %s; %s, like all that fail so and are not told", where, told, handled)

    def take_counts(self) -> dict[str, int]:
        """By kind since this was asked last."""
        counts, self._counts = dict(self._counts), Counter()
        return counts
