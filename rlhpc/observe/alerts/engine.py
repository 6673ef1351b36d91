"""Evaluates all rules after each step; a rule fires once per episode."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rlhpc.observe.alerts.rules import Record, Rule


@dataclass(frozen=True)
class Fired:
    """A rule whose condition has begun to hold."""

    rule: Rule
    message: str


class Engine:
    """Checks the records of a run in their order.

    A rule that has fired is quiet until its condition has been false for its window. ``past``: records of earlier
    attempts, which fire nothing but are what later ones are compared with.
    """

    def __init__(self, rules: Sequence[Rule], past: Iterable[Record] = ()) -> None:
        self._rules, self._phase = rules, ""
        self._episodes: list[_Episode] = []
        for record in past:
            self.add(record)

    def add(self, record: Record) -> list[Fired]:
        """The rules that fire at the next record, which has its ``phase``, ``step`` and ``time``."""
        if record["phase"] != self._phase:
            self._phase = record["phase"]
            self._episodes = [_Episode(rule) for rule in self._rules]
        found = [(episode.rule, episode.add(record)) for episode in self._episodes]
        return [Fired(rule, message) for rule, message in found if message]


class _Episode:
    """State of a rule in a phase."""

    def __init__(self, rule: Rule) -> None:
        self.rule, self._detector = rule, rule.detector()
        self._on, self._false, self._since = False, 0, math.inf

    def add(self, record: Record) -> str:
        """The message if the rule fires now."""
        message = self._detector.add(record)
        if message is None:
            return ""
        if message:
            begins, self._on, self._false = not self._on, True, 0
            return message if begins else ""
        if self._on:
            self._since = record["time"] if not self._false else self._since
            self._false += 1
            window, seconds = self.rule.window, record["time"] - self._since
            self._on = self._false < window.steps or seconds < 60 * window.minutes
        return ""
