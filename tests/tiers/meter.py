"""Meter of CPU seconds of all processes that a run of tests starts.

pytest enters a control group of its own (cgroup v2). Every process inherits it: ended ones, orphans, daemons, forks of
a warm process, other users' processes in other namespaces. The kernel counts their time there.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Iterable
from pathlib import Path

_NAME = "rlhpc-tests-"  # of control groups, followed by the process id
_MOUNTS = Path("/proc/self/mountinfo")
_TICKS = os.sysconf("SC_CLK_TCK")


class Meter:
    """CPU seconds since this process entered a group of its own; None where it may not make one."""

    def __init__(self, mounts: Path = _MOUNTS) -> None:
        self._group = _enter(mounts)

    def seconds(self, but: Iterable[int] = ()) -> float | None:
        """Seconds of all processes in the group, without what the processes ``but`` took themselves."""
        if self._group is None:
            return None
        found = re.search(r"usage_usec (\d+)", (self._group / "cpu.stat").read_text())
        assert found
        return int(found[1]) / 1e6 - sum(map(_own_seconds, but))

    def close(self) -> None:
        """Leave the group, and remove it unless processes are left."""
        if self._group is not None:
            (self._group.parent / "cgroup.procs").write_text("0")
            with contextlib.suppress(OSError):
                self._group.rmdir()
            self._group = None


def _enter(mounts: Path) -> Path | None:
    for line in mounts.read_text(encoding="utf-8").splitlines():
        if " - cgroup2 " in line:
            mount = Path(line.split()[4])
            break
    else:
        return None
    (own,) = re.findall(r"^0::/(.*)$", Path("/proc/self/cgroup").read_text(encoding="utf-8"), re.M)
    group = mount / own / f"{_NAME}{os.getpid()}"
    try:
        for old in group.parent.glob(f"{_NAME}*"):
            if not Path("/proc", old.name.removeprefix(_NAME)).exists():
                with contextlib.suppress(OSError):  # a process is left in it
                    old.rmdir()
        group.mkdir(exist_ok=True)
        (group / "cgroup.procs").write_text("0")
    except OSError:
        return None
    return group


def _own_seconds(pid: int) -> float:
    """CPU seconds of one process, without those of its children."""
    _, _, fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")
    return sum(map(int, fields.split()[11:13])) / _TICKS


def fixed_work(pieces: int = 10) -> float:
    """CPU seconds of a fixed piece of work, on average of ``pieces`` of a tenth of it. A machine takes about one; less
    cache or a slower clock beside other processes takes more."""
    began = time.process_time()
    for _ in range(pieces):
        document = {f"key {number}": [number, str(number), {"half": number / 2}] for number in range(18_000)}
        json.loads(json.dumps(document, sort_keys=True))
    return (time.process_time() - began) * 10 / pieces
