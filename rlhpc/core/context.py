"""What a rank's program is given by whatever started the process."""

from __future__ import annotations

from dataclasses import dataclass

from rlhpc.core.folder import AttemptFolder, RunFolder
from rlhpc.core.heartbeat import Heartbeat
from rlhpc.core.rank import RankInfo
from rlhpc.core.stop import StopRequest


@dataclass(frozen=True)
class RankContext:
    """A program ``package.module:function`` is called with it, and returns why it stopped early, None if it did not."""

    attempt: AttemptFolder
    info: RankInfo
    stop: StopRequest
    heartbeat: Heartbeat

    @property
    def run(self) -> RunFolder:
        return self.attempt.run
