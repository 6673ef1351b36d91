"""A user's algorithm whose import makes rank 1 die in the middle of its second weight sync."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from rlhpc.algo.grpo import GRPO as ALGORITHM  # noqa: F401
from rlhpc.core.rank import RankInfo

_weight_syncs = 0


def _plant() -> None:
    from rlhpc.reshard.executor import Mover

    exchange = Mover._exchange

    def die_in_the_second(self: Mover, bucket: int, *buffers: Any) -> Any:
        global _weight_syncs
        _weight_syncs += bucket == 0
        if _weight_syncs == 2 and RankInfo.from_environ().rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return exchange(self, bucket, *buffers)

    Mover._exchange = die_in_the_second


if "rlhpc.reshard.executor" in sys.modules:  # in a rank, not where the run is checked
    _plant()
