"""Record of an engine's actions between its steps, from which a replay is equal bit for bit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

ActKind = Literal["admit", "answer", "switch"]


@dataclass(frozen=True)
class Act:
    """An engine has started a group, taken the answer of a tool call, or switched to new weights.

    ``version``: that of its weights before; ``steps``: its steps with them so far; ``value``: group, call or version.
    The acts of an engine, with its steps between them, determine every bit that it generates.
    """

    version: int
    steps: int
    kind: ActKind
    value: int


class ActLog:
    """Acts of one engine from ``version`` on."""

    def __init__(self, version: int) -> None:
        self.version, self.steps = version, 0  # steps with this version
        self._acts: list[Act] = []

    def stepped(self) -> None:
        """Counts an engine step."""
        self.steps += 1

    def add(self, kind: ActKind, value: int) -> Act:
        """Adds what the engine has done now."""
        act = Act(self.version, self.steps, kind, value)
        self._acts.append(act)
        if kind == "switch":
            self.version, self.steps = value, 0
        return act

    def take(self) -> list[Act]:
        """Actions added since the last call."""
        acts, self._acts = self._acts, []
        return acts


def acts_json(acts: Iterable[Act]) -> list[list[Any]]:
    """As they are recorded: version, steps, kind, value of each."""
    return [[act.version, act.steps, act.kind, act.value] for act in acts]


def acts_of(record: Iterable[Sequence[Any]]) -> list[Act]:
    """From ``acts_json``."""
    return [Act(*each) for each in record]
