"""Starts and ends the process that feeds a run's trackers (rlhpc.observe.trackers). It never delays or ends the run."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

from rlhpc.config.schema import RunConfig
from rlhpc.core.folder import RunFolder
from rlhpc.core.shown import ShownOnly, show

TRACKER_SECONDS = 12.0  # it gives up before that by itself (rlhpc.observe.trackers.process)
_KILLED_SECONDS = 1.0
_MODULE = "rlhpc.observe.trackers"


class TrackerProcess:
    """The process, if the configuration has trackers. That it ends unasked is reported once."""

    def __init__(self, folder: RunFolder, config: RunConfig) -> None:
        self._folder, self._guard = folder, ShownOnly("trackers")
        self._process: subprocess.Popen[bytes] | None = None
        self._asked = False
        names = config.observe.tracker_names()
        if names:
            with self._guard:
                self._process = _start(folder, names)
                threading.Thread(target=self._wait, name="trackers", daemon=True).start()

    def end(self, seconds: float = TRACKER_SECONDS) -> None:
        """Lets it deliver the last steps, for at most ``seconds``."""
        process, self._asked = self._process, True
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
        assert self._process is not None
        code = self._process.wait()
        if not self._asked:
            how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
            self._report(f"{how}: {self._folder.trackers.log}")

    def _report(self, text: str) -> None:
        where = f"send what is missing after the run: rlhpc sync {self._folder.path}"
        show(f"rlhpc: warning: the process of the trackers {text}; {where}", file=sys.stderr)


@contextlib.contextmanager
def fed_trackers(folder: RunFolder, config: RunConfig) -> Iterator[None]:
    """Context in which the trackers of a run are fed; they get the last steps at its end."""
    process = TrackerProcess(folder, config)
    try:
        yield
    finally:
        process.end()


def _start(folder: RunFolder, names: list[str]) -> subprocess.Popen[bytes]:
    """The process, in a session of its own: Ctrl-C is for the launcher. It ends soon after its standard input does."""
    command = [sys.executable, "-m", _MODULE, str(folder.path), *names]
    return subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
