"""Stacks of this process by py-spy, taken from outside at intervals."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sysconfig
import threading
import time
from pathlib import Path

from rlhpc.core import env

_INTERVAL_SECONDS, _MOST_DUMPS = 1.0, 60
_DUMP_SECONDS, _END_SECONDS = 30.0, 60.0
_MOST_BYTES = 1 << 20  # of one dump
# prctl(2): Yama lets only ancestors trace a process unless it allows others, such as py-spy, which is a child.
_PR_SET_PTRACER, _ANY, _NONE = 0x59616D61, -1, 0


def find_py_spy() -> str | None:
    """Path of py-spy in this environment or PATH; None if it is not installed."""
    folders = [sysconfig.get_path("scripts"), *os.environ.get(env.PATH, os.defpath).split(os.pathsep)]
    return shutil.which("py-spy", path=os.pathsep.join(folders))


class Stacks:
    """Dumps the stacks of all threads of this process: at once, then every second, at most 60 times."""

    def __init__(self) -> None:
        self._program = find_py_spy()
        self._done = threading.Event()
        self._thread: threading.Thread | None = None
        self.error = ""

    def start(self, stem: Path) -> None:
        """Begins to append dumps to a file named after ``stem``."""
        if self._program is None:
            raise FileNotFoundError("py-spy is not installed; pip install py-spy")
        self._done.clear()
        _set_tracer(_ANY)
        path, began = Path(f"{stem}.stacks.txt"), time.monotonic()
        path.unlink(missing_ok=True)
        self._thread = threading.Thread(target=self._run, args=(path, began), name="py-spy", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends after the dump in progress. Raises RuntimeError if py-spy failed."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._done.set()
        thread.join(_END_SECONDS)
        _set_tracer(_NONE)
        error, self.error = self.error, ""
        if error:
            raise RuntimeError(error)

    def write(self) -> None:
        """Does nothing: each dump is in the file when it is taken."""

    def _run(self, path: Path, began: float) -> None:
        try:
            for _ in range(_MOST_DUMPS):
                head = f"--- {time.monotonic() - began:.2f} s\n"
                with open(path, "a", encoding="utf-8") as file:
                    file.write(head + self._dump() + "\n")
                if self._done.wait(_INTERVAL_SECONDS):
                    return
        except (OSError, RuntimeError, subprocess.SubprocessError) as error:
            self.error = str(error)

    def _dump(self) -> str:
        assert self._program is not None
        command = [self._program, "dump", "--pid", str(os.getpid())]
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_DUMP_SECONDS, stdin=subprocess.DEVNULL
        )
        if done.returncode:
            raise RuntimeError(f"py-spy: {' '.join(done.stderr.split()) or f'exit code {done.returncode}'}")
        return done.stdout[:_MOST_BYTES]


def _set_tracer(process: int) -> None:
    """Lets ``process`` trace this one. Fails without Yama, where nothing is needed."""
    ctypes.CDLL(None).prctl(_PR_SET_PTRACER, ctypes.c_long(process), 0, 0, 0)
