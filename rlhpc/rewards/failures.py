"""Handles responses that a reward function failed on."""

from __future__ import annotations

import logging
from typing import Literal

from rlhpc.api import Prompt
from rlhpc.config.reward import RewardWorkersSection
from rlhpc.core.errors import UserError
from rlhpc.rewards.calls import UNFINISHED, Failure

Action = Literal["error", "zero", "drop"]

_log = logging.getLogger(__name__)
_SHOWN = 80
_REMEDY_UNFINISHED = "raise its limits (time_limit_seconds, memory_limit_mib), or set reward_workers.on_timeout"


class Failures:
    """Handles failures as configured, and logs the first of each kind."""

    def __init__(self, section: RewardWorkersSection, remedy: str) -> None:
        """``remedy`` is the fix named when a function raises or returns no finite number, and that ends the run."""
        self._on_failure, self._on_timeout, self._remedy = section.on_failure, section.on_timeout, remedy
        self._logged: set[tuple[str, str]] = set()

    def handle(
        self,
        where: str,
        failure: Failure,
        prompt: Prompt,
        text: str,
        *,
        log: bool = True,
        built_in: bool = False,
    ) -> bool:
        """True if the response ``text`` is dropped because the reward at ``where`` failed on it.

        If not, that reward counts as 0. Raises a UserError if the failure ends the run.
        """
        unfinished = failure.kind in UNFINISHED
        action = self.action(failure, built_in=built_in)
        what = f"{failure.what} for prompt {prompt.prompt_id} of {prompt.data_source!r}, response {text[:_SHOWN]!r}"
        if action == "error":
            raise UserError(what, where=where, remedy=_REMEDY_UNFINISHED if unfinished else self._remedy)
        if log and (where, failure.kind) not in self._logged:
            self._logged.add((where, failure.kind))
            handled = {"zero": "counted as 0", "drop": "dropped from training"}[action]
            _log.warning("%s: %s; %s, like further failures of this kind, which are not logged", where, what, handled)
        return action == "drop"

    def action(self, failure: Failure, *, built_in: bool) -> Action:
        """The configured action; a response cannot end the run or be dropped by making a built-in function slow."""
        if failure.kind not in UNFINISHED:
            return self._on_failure
        return "zero" if built_in else self._on_timeout
