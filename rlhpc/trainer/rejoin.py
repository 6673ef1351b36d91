"""Return of a restarted engine to trainers that keep training.

Its first rank asks on the board once it has loaded; the trainers call all of its ranks when they can connect.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rlhpc.parallel.board import Board
from rlhpc.rollout.generator.parts import EnginePlace
from rlhpc.trainer.handshake import Check, wait_together

JOIN_SECONDS = 30.0  # in which both sides must connect, once they can


@dataclass(frozen=True)
class Joining:
    """An engine that joins, and how often these trainers have seen it begin before."""

    engine: int
    generation: int


def ask_to_join(board: Board, joining: Joining) -> None:
    """The engine is ready."""
    board.post(_ready(joining.engine), joining.generation)


def wait_for_call(place: EnginePlace, board: Board, joining: Joining, check: Check) -> int:
    """Waits for the trainers; returns the number, since these have begun, of the version with which the engine begins.
    See ``wait_together``."""
    return int(wait_together(place, board, _call(joining), "waiting for trainers", check))


def ready_to_join(board: Board, absent: Iterable[int], known: dict[int, int]) -> list[Joining]:
    """Engines of those that are absent which are ready. ``known``: the newest generation of each so far."""
    engines = [*absent]
    found = board.read(map(_ready, engines))
    newest = [Joining(engine, found[_ready(engine)]) for engine in engines if _ready(engine) in found]
    return [joining for joining in newest if joining.generation > known.get(joining.engine, 0)]


def call(board: Board, joining: Joining, number: int) -> None:
    """Lets an engine's ranks connect, with the ``number``-th version of the weights."""
    board.post(_call(joining), number)


def _ready(engine: int) -> str:
    return f"engine/{engine}/ready"


def _call(joining: Joining) -> str:
    return f"engine/{joining.engine}/call/{joining.generation}"
