"""A rank that waits for another role shows that, and does not count as making progress: else no hang would end."""

from __future__ import annotations

import json
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
