"""The board of a job, on a store of torch's."""

from __future__ import annotations

import threading
import time

import pytest
import torch.distributed as dist

from rlhpc.core.errors import PeerLost
from rlhpc.parallel.board import Board

pytestmark = pytest.mark.heavy


def test_values_are_posted_replaced_read_and_dropped() -> None:
    store = dist.HashStore()
    board, other = Board(store), Board(store, "another one")
    board.post("published/3", {"version": 3, "checkpoint": ""})
    board.post("published/4", {"version": 4})
    board.post("published/4", [4, None])
    assert Board(store).read(["published/3", "published/4", "published/5"]) == {
        "published/3": {"version": 3, "checkpoint": ""},
        "published/4": [4, None],
    }
    assert board.read(["published/4"]) == {"published/4": [4, None]}
    assert board.read([]) == other.read(["published/3"]) == {}
    board.drop("published/3")
    board.drop("published/9")
    assert board.read(["published/3"]) == {}
    with pytest.raises(AssertionError, match="5,000,002 bytes for key large of the board"):
        board.post("large", "x" * 5_000_000)


def test_a_value_is_awaited_with_checks_and_a_limit() -> None:
    store, calls = dist.HashStore(), []
    poster = threading.Timer(0.7, lambda: Board(store).post("a", 1))
    poster.start()
    assert Board(store).wait_for("a", 20, check=lambda: calls.append(time.monotonic())) == 1
    poster.join()
    assert len(calls) == 2
    with pytest.raises(PeerLost, match=r"no rank has posted b on the board within 0\.01 s"):
        Board(store).wait_for("b", 0.01)

    def lost() -> None:
        raise PeerLost("lost rank 3")

    with pytest.raises(PeerLost, match="lost rank 3"):
        Board(store).wait_for("b", 20, check=lost)
