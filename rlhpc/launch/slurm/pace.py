"""How often a command that follows a run asks Slurm's controller, which serves every user of the cluster."""

from __future__ import annotations

import time

SHORTEST_SECONDS, LONGEST_SECONDS = 15.0, 60.0  # between two questions: after news, and as long as there are none
SETTLE_SECONDS = 3.0  # from a change of the run folder to a question: the job's state changes soon after


class ControllerPace:
    """Decides when to ask: never twice within 15 s, after 15, 30 and then 60 s while answers stay the same, and soon
    after the run folder has changed. The first question is due at once, or after 15 s if the job is ``known``."""

    def __init__(self, *, known: bool = False) -> None:
        self._pause, self._asked = SHORTEST_SECONDS, float("-inf")
        self._due = time.monotonic() + SHORTEST_SECONDS if known else float("-inf")
        self._answer: object = None
        self._folder: object = None
        self._seen = False

    def is_due(self, folder: object = None) -> bool:
        """Whether to ask now. ``folder``: what the run folder shows."""
        now = time.monotonic()
        if self._seen and folder != self._folder:
            self._pause = SHORTEST_SECONDS
            self._due = min(self._due, max(now + SETTLE_SECONDS, self._asked + SHORTEST_SECONDS))
        self._folder, self._seen = folder, True
        return now >= self._due

    def answered(self, answer: object) -> None:
        """Notes an answer."""
        self._pause = min(2 * self._pause, LONGEST_SECONDS) if answer == self._answer else SHORTEST_SECONDS
        self._answer, self._asked = answer, time.monotonic()
        self._due = self._asked + self._pause
