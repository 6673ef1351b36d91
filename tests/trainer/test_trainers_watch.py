"""An engine notes that trainers were started again, also where a child of dead ones holds their connections open."""

from __future__ import annotations

import pytest

from rlhpc.core.errors import PeerLost
from rlhpc.core.store_client import TrainersStart
from rlhpc.parallel.channel import Inbox
from rlhpc.trainer.engine_rank import TrainersWatch


def test_a_newer_start_is_a_loss_and_is_asked_for_now_and_then() -> None:
    asked, newer = list[float](), list[TrainersStart]()

    def newer_start() -> TrainersStart | None:
        asked.append(1.0)
        return newer[0] if newer else None

    watch = TrainersWatch(Inbox(), 1000.0, newer_start)
    for _ in range(100):
        watch.check()
    assert asked == []
    watch = TrainersWatch(Inbox(), 0.0, newer_start)
    watch.check()
    assert asked == [1.0]
    newer.append(TrainersStart(1))
    with pytest.raises(PeerLost, match="started again"):
        watch.check()
