"""Processes that the launcher runs beside the ranks: one renews the page of the run, one feeds its trackers.

The page report/report.html is renewed while the run is going and at the end of each attempt. Neither process delays or
ends the run.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time

from rlhpc.config.schema import RunConfig
from rlhpc.core.folder import RunFolder
from rlhpc.core.records import MetricsFile
from rlhpc.core.shown import ShownOnly, show

LOOK_SECONDS = 2.0
PAGE_STEPS = 50  # between two renewals, which read the whole run: curves change little in fewer steps
PAGE_SECONDS = 20.0  # maximum time that the end of a run waits for its page
TRACKER_SECONDS = 12.0  # it gives up before that by itself (rlhpc.observe.trackers)
_KILLED_SECONDS = 1.0


class PageRenewal:
    """Renews the page whenever the step has passed a multiple of ``every``.

    A process of the lowest priority writes it, one at a time. A run of fewer steps has its page at its end only: a few
    milliseconds of a thread's work.
    """

    def __init__(self, run: RunFolder, every: int) -> None:
        self._run, self._every = run, every
        self._guard = ShownOnly("the page of the run")
        self._child: subprocess.Popen[bytes] | None = None
        self._thread: threading.Thread | None = None
        self._looked, self._reached = time.monotonic(), ("", 0)
        with self._guard:
            self._reached = self._place()

    def poll(self) -> None:
        """Starts a renewal if one is due. Called in a loop; it looks at the metrics every two seconds."""
        now = time.monotonic()
        if now - self._looked >= LOOK_SECONDS:
            self._looked = now
            with self._guard:
                self._renew_if_due()

    def end(self, seconds: float = PAGE_SECONDS) -> None:
        """Writes the page of an attempt that has ended, and waits for it at most ``seconds``."""
        with self._guard:
            self._stop_child()
            if self._place()[1]:
                self._start_child()
                deadline = time.monotonic() + seconds
                while time.monotonic() < deadline and self._is_writing():
                    time.sleep(0.02)
            elif not self._is_writing():
                self._thread = threading.Thread(target=self._write, name="page", daemon=True)
                self._thread.start()
                self._thread.join(seconds)

    def _renew_if_due(self) -> None:
        if self._is_writing():
            return
        place = self._place()
        if place != self._reached and place[1]:
            self._start_child()
        self._reached = place

    def _place(self) -> tuple[str, int]:
        """Phase, and number of multiples of ``every`` that its steps have passed."""
        phase, step = MetricsFile(self._run.metrics).last_step() or ("", 0)
        return phase, step // self._every

    def _is_writing(self) -> bool:
        """True if the page is being written; reports a process that failed."""
        if self._thread is not None and self._thread.is_alive():
            return True
        if self._child is None:
            return False
        code = self._child.poll()
        if code is None:
            return True
        self._child = None
        if code:
            raise RuntimeError(f"its process ended with {code}; write it with: rlhpc report {self._run.path}")
        return False

    def _start_child(self) -> None:
        command = [sys.executable, "-m", "rlhpc.observe.page", str(self._run.path)]
        nowhere = subprocess.DEVNULL
        self._child = subprocess.Popen(  # Ctrl-C is for the launcher
            command, stdin=nowhere, stdout=nowhere, stderr=nowhere, start_new_session=True
        )

    def _stop_child(self) -> None:
        """Ends a renewal: a newer one follows."""
        if self._child is not None:
            self._child.kill()
            self._child.wait(1.0)
            self._child = None

    def _write(self) -> None:
        with self._guard:
            from rlhpc.observe.page.document import write_own_page  # no start of a run needs it

            write_own_page(self._run, training=False)


class TrackerProcess:
    """Process of the trackers, if the configuration has any (rlhpc.observe.trackers). An unasked end is reported
    once."""

    def __init__(self, folder: RunFolder, config: RunConfig) -> None:
        self._folder, self._guard = folder, ShownOnly("trackers")
        self.process: subprocess.Popen[bytes] | None = None
        self._asked = False
        names = config.observe.tracker_names()
        if names:
            with self._guard:
                self.process = _start(folder, names)
                threading.Thread(target=self._wait, name="trackers", daemon=True).start()

    def end(self, seconds: float = TRACKER_SECONDS) -> None:
        """Lets the process deliver the last steps, for at most ``seconds``."""
        process, self._asked = self.process, True
        if process is None or process.poll() is not None:
            return
        with self._guard:
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(seconds)
            except subprocess.TimeoutExpired:
                self._report(f"has not delivered the last steps within {seconds:g} s")
            finally:
                if process.poll() is None:
                    with contextlib.suppress(ProcessLookupError, PermissionError, subprocess.TimeoutExpired):
                        os.killpg(process.pid, signal.SIGKILL)
                        process.wait(_KILLED_SECONDS)

    def _wait(self) -> None:
        assert self.process is not None
        code = self.process.wait()
        if not self._asked:
            how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
            self._report(f"{how}: {self._folder.trackers.log}")

    def _report(self, text: str) -> None:
        where = f"send what is missing after the run: {self._folder.trackers.command}"
        show(f"rlhpc: warning: the process of the trackers {text}; {where}", file=sys.stderr)


def _start(folder: RunFolder, names: list[str]) -> subprocess.Popen[bytes]:
    """The process, in a session of its own: Ctrl-C is for the launcher. It ends soon after its standard input does."""
    command = [sys.executable, "-m", "rlhpc.observe.trackers", "--follow", str(folder.path), *names]
    return subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
