"""Arguments of a rank's program, and requests to stop it.

A request is remembered until the ranks agree on it at the end of a step.
"""

from __future__ import annotations

import signal
import threading
from dataclasses import dataclass
from multiprocessing import resource_tracker
from typing import Literal

from rlhpc.core.folder import AttemptFolder, RunFolder
from rlhpc.core.heartbeat import Heartbeat
from rlhpc.core.rank import RankInfo

# In ascending order of precedence: of different reasons on the ranks, the last counts.
Reason = Literal["none", "deadline", "asked", "alert", "terminated"]
REASONS: tuple[Reason, ...] = ("none", "deadline", "asked", "alert", "terminated")

# Slurm preempts with SIGTERM; `--signal` and `scancel --signal` send USR2 (NCCL may catch USR1).
_SIGNALS: dict[signal.Signals, Reason] = {signal.SIGTERM: "terminated", signal.SIGUSR2: "asked"}


class StopRequest:
    """Records the signals and alerts that ask this process to save, or to save and end."""

    def __init__(self) -> None:
        self.reason: Reason = "none"
        self.saves = False  # a checkpoint after this step, without an end

    def ask(self, reason: Reason) -> None:
        """Asks to save and end, unless another reason of higher precedence is known."""
        if REASONS.index(reason) > REASONS.index(self.reason):
            self.reason = reason

    def listen(self) -> None:
        """Handles the signals from now on. Call in the main thread, before any other thread or process is started.

        Slurm signals every process of a step. The signals are blocked and received by a thread of their own, so that
        they do not end helpers of a save, which inherit the block, and do not wait for a main thread in native code.
        Threads that libraries start without the block find a handler.
        """
        for signum in _SIGNALS:
            signal.signal(signum, self._note)
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        resource_tracker.ensure_running()  # multiprocessing would start it later, and then unblocks SIGTERM
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        threading.Thread(target=self._wait, name="stop-request", daemon=True).start()

    def _wait(self) -> None:
        while True:
            self._note(signal.sigwait(_SIGNALS))

    def _note(self, signum: int, frame: object = None) -> None:
        self.ask(_SIGNALS[signal.Signals(signum)])


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
