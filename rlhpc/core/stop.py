"""A rank's part in stopping together: what asked it to, kept until the ranks agree at the end of a step."""

from __future__ import annotations

import signal
import threading
from multiprocessing import resource_tracker
from typing import Literal

# In the order of their weight: when ranks were asked for different reasons, the heaviest is agreed on.
Reason = Literal["none", "deadline", "asked", "terminated"]
REASONS: tuple[Reason, ...] = ("none", "deadline", "asked", "terminated")

# Slurm preempts with SIGTERM; USR2 is what `--signal` and `scancel --signal` send here (NCCL may catch USR1).
_SIGNALS: dict[signal.Signals, Reason] = {signal.SIGTERM: "terminated", signal.SIGUSR2: "asked"}


class StopRequest:
    """Remembers the signals that ask this process to save and end."""

    def __init__(self) -> None:
        self.reason: Reason = "none"

    def listen(self) -> None:
        """Take the signals from now on. Call in the main thread, before any other thread or process is started.

        Slurm signals every process of a step. Blocked here, and taken by a thread of their own, the signals do not end
        the helpers that a save needs, which inherit the block; nor do they wait for a main thread that is deep in C.
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
        reason = _SIGNALS[signal.Signals(signum)]
        if REASONS.index(reason) > REASONS.index(self.reason):
            self.reason = reason
