"""Asks the engines that are present which groups they have, after another one was lost."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from rlhpc.parallel.board import Board
from rlhpc.rollout.generator.messages import ROLL_CALL_KEY, RollCall


class RollCaller:
    """Roll calls, one at a time: a new one replaces one that is not complete."""

    def __init__(self, board: Board) -> None:
        self._board, self._number = board, -1
        self._held: dict[int, Sequence[int]] | None = None  # by engine, while a roll call goes on

    def begin(self) -> None:
        """Asks all engines for their groups."""
        self._number += 1
        self._held = {}
        self._board.post(ROLL_CALL_KEY, RollCall(self._number).to_json())

    @property
    def pending(self) -> bool:
        """True if a roll call goes on."""
        return self._held is not None

    def take(self, engine: int, number: int, groups: Sequence[int]) -> None:
        """Takes an engine's answer; one to a former roll call does not count."""
        if self._held is not None and number == self._number:
            self._held[engine] = groups

    def answer(self, present: Collection[int]) -> set[int] | None:
        """Once, when all engines that are present have answered: the groups that they have."""
        if self._held is None or not self._held.keys() >= {*present}:
            return None
        held, self._held = self._held, None
        return {group for engine in present for group in held[engine]}
