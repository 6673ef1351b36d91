"""Engines draw groups from pots: each place once, and what an engine has drawn in vain belongs to the next pot."""

from __future__ import annotations

import torch.distributed as dist

from rlhpc.parallel.board import Board
from rlhpc.rollout.generator.draws import Draws, close_pot, post_pot
from rlhpc.rollout.schedule.pots import Pot


def test_a_place_beyond_a_closed_pot_is_none_of_what_an_engine_has() -> None:
    """Else a group of the next pot that a lost engine had would seem to be here."""
    board = Board(dist.HashStore())
    post_pot(board, Pot(0, 0, 2))
    one, other = (Draws(board, 0, engine, filtered=False, engines=2) for engine in range(2))
    assert [one.draw(), other.draw(), one.draw()] == [0, 1, None]
    assert one.reserved == [2], "as long as the pot may grow"
    assert other.reserved == []
    drawn, dropped = close_pot(board, 0)
    assert (drawn, dropped) == (3, 0)
    post_pot(board, Pot(1, 2, 2, former_places=2))
    assert one.reserved == [], "group 2 is one of the next pot"
    one.switch(1)
    assert one.reserved == []
    other.switch(1)
    assert [other.draw(), one.draw()] == [2, 3]


def test_a_reserved_place_starts_once_the_pot_has_grown_to_it() -> None:
    board = Board(dist.HashStore())
    post_pot(board, Pot(0, 0, 1))
    draws = Draws(board, 0, 0, filtered=True, engines=1)
    assert [draws.draw(), draws.draw()] == [0, None]
    post_pot(board, Pot(1, 2, 1, dropped=1, former_places=2))
    draws.switch(1)
    assert draws.reserved == [1]
    assert draws.draw() == 1
