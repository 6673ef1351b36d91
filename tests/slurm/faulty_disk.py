"""A file system over a folder that fails or is slow on demand, by FUSE: for all processes of all nodes."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.helpers.runs import ROOT
from tests.slurm.scontrol import wait

_WRITES = frozenset({"create", "write", "mkdir", "rename", "unlink", "rmdir", "truncate", "symlink", "link", "fsync"})


@dataclass(frozen=True)
class State:
    """``number``: errno of the calls in ``calls`` (all, writes or syncs), 0 if they work. ``delay``: their seconds."""

    number: int = 0
    calls: str = "all"
    delay: float = 0.0

    def fails(self, name: str) -> bool:
        """Whether the operation of this name fails."""
        selected = {"all": True, "writes": name in _WRITES, "syncs": name == "fsync"}[self.calls]
        return bool(self.number) and selected

    def __str__(self) -> str:
        return f"{self.number} {self.calls} {self.delay}"

    @classmethod
    def of(cls, line: str) -> State:
        """The state that ``str`` has written."""
        number, calls, delay = line.split()
        return cls(int(number), calls, float(delay))


class FaultyDisk:
    """The file system at ``mount``, whose files are in ``source``; ended by ``close``. Root only."""

    def __init__(self, source: Path, mount: Path) -> None:
        source.mkdir(parents=True, exist_ok=True)
        mount.mkdir(parents=True, exist_ok=True)
        self._mount = mount
        command = [sys.executable, "-m", "tests.slurm.faulty_files", str(source), str(mount)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._process = subprocess.Popen(command, text=True, cwd=ROOT, start_new_session=True, **pipes)
        wait(lambda: os.path.ismount(mount) or self._process.poll() is not None, f"{mount} to be mounted")
        assert os.path.ismount(mount), f"{mount} could not be mounted"

    def set(self, state: State) -> None:
        """Calls from now on are in this state."""
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(f"{state}\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline(), "the file system is gone"

    def close(self) -> None:
        subprocess.run(["umount", "-l", str(self._mount)], check=False)
        self._process.kill()
        self._process.wait()


def possible() -> bool:
    """Whether FUSE can be used here."""
    return (
        importlib.util.find_spec("mfusepy") is not None
        and os.geteuid() == 0
        and os.access("/dev/fuse", os.R_OK | os.W_OK)
    )
