"""A rollout job reaches the store of an attempt by its private record, and notes its end."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from rlhpc.core.folder import RunFolder
from rlhpc.core.store_client import BOARD, LOST_ENGINES, StoreAddress, StoreConnection
from rlhpc.core.store_protocol import Op
from rlhpc.launch.supervise import rollout_jobs
from rlhpc.launch.supervise.job_ranks import TrainersBoard
from rlhpc.launch.supervise.job_store import StoreServer
from rlhpc.launch.supervise.rollout_jobs import SharedStore, find_store, forget_store, share_store


def test_the_store_is_found_read_and_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout_jobs, "_CONNECT_SECONDS", 0.5)
    attempt = RunFolder(tmp_path).attempt(1)
    attempt.path.mkdir(parents=True)
    assert find_store(attempt) is None
    server = StoreServer.open(host="127.0.0.1")
    address = StoreAddress("127.0.0.1", server.port, server.secret)
    share_store(attempt, address)
    assert stat.S_IMODE(attempt.store.stat().st_mode) == 0o600
    assert find_store(attempt) == address
    store = SharedStore.connect(address)
    assert store is not None
    board = TrainersBoard(store.read)
    assert (board.lost_engines(), board.has_begun(), store.lost) == ({}, False, False)
    rank = StoreConnection(address)
    rank.call(Op.SET, [f"{BOARD}/{LOST_ENGINES}".encode(), b'{"3": [2, "does not respond"]}'])
    assert TrainersBoard(store.read).lost_engines() == {3: (2, "does not respond")}
    rank.close()
    server.close()
    assert store.read("anything") is None
    assert store.lost
    assert SharedStore.connect(address) is None
    forget_store(attempt)
    assert find_store(attempt) is None
