"""The board of a job, on a store of torch's, and ranks that wait for another role."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from rlhpc.core.errors import PeerLost
from rlhpc.core.heartbeat import Heartbeat
from rlhpc.core.store_client import StoreAddress
from rlhpc.launch.supervise.job_store import StoreServer
from rlhpc.parallel.board import Board
from rlhpc.parallel.channel import Inbox
from rlhpc.reshard.staged.job import Background

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


def test_waiting_for_another_role_is_no_progress(tmp_path: Path) -> None:
    server = StoreServer.open(host="127.0.0.1")
    heartbeat = Heartbeat(tmp_path, 0, store=StoreAddress("127.0.0.1", server.port, server.secret)).start()
    try:
        assert not Inbox().wait(0.01, "waiting for responses")
        assert heartbeat.phase == "waiting for responses"
        with pytest.raises(PeerLost, match="no rank has posted version/3"):
            Board(dist.HashStore()).wait_for("version/3", 0.01)
        assert heartbeat.phase == "waiting for version/3"
        thread, looks = Background("nothing", lambda: None), iter((False, True))
        thread.wait(lambda: next(looks), "waiting for weights")
    finally:
        heartbeat.stop()
        server.close()
    record = server.beats.record(0)
    assert record is not None
    beat = json.loads(record[0])
    assert (beat["touches"], beat["phase"]) == (0, "waiting for weights")
