"""Arguments of a rank's program."""

from __future__ import annotations

from dataclasses import dataclass

from rlhpc.core.folder import AttemptFolder, RunFolder
from rlhpc.core.heartbeat import Heartbeat
from rlhpc.core.rank import RankInfo
from rlhpc.core.stop import StopRequest


@dataclass
class RankContext:
    """The only argument of a rank's program, ``package.module:function``, which returns why it stopped early, or
    None."""

    attempt: AttemptFolder
    info: RankInfo
    stop: StopRequest
    heartbeat: Heartbeat

    @property
    def run(self) -> RunFolder:
        return self.attempt.run
