"""An engine notes that trainers were started again, also where a child of dead ones holds their connections open."""

from __future__ import annotations

import pytest

from rlhpc.core.errors import PeerLost
from rlhpc.core.store_client import TrainersStart
from rlhpc.parallel.channel import Inbox
from rlhpc.trainer import engine_rank


def test_a_newer_start_is_a_loss_and_is_asked_for_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, newer = list[float](), list[TrainersStart]()
    monkeypatch.setattr(engine_rank, "_newer_start", lambda: asked.append(1.0) or (newer[0] if newer else None))
    watch = engine_rank._TrainersWatch(Inbox())
    for _ in range(100):
        watch.check()
    assert asked == []
    monkeypatch.setattr(engine_rank, "_WATCH_SECONDS", 0.0)
    watch.check()
    assert asked == [1.0]
    newer.append(TrainersStart(1))
    with pytest.raises(PeerLost, match="started again"):
        watch.check()
