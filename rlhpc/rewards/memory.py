"""Bounds the memory that each call may allocate; the kernel enforces it.

The bound is on private writable memory (RLIMIT_DATA), not on address space: libraries such as PyTorch reserve far more
address space than they use.
"""

from __future__ import annotations

import resource
from pathlib import Path

_MIB = 1 << 20
_PAGE = resource.getpagesize()


class MemoryBound:
    """``mib`` MiB for each call, beyond what this process has when the call begins."""

    def __init__(self, mib: int) -> None:
        self.mib, self._room = mib, mib * _MIB
        self._before = self._kept = 0
        self._limits = resource.getrlimit(resource.RLIMIT_DATA)  # in force between calls

    def enforce(self) -> None:
        """From now on allocations beyond the bound fail."""
        self._before = _data_bytes()
        others = [limit for limit in self._limits if limit != resource.RLIM_INFINITY]
        resource.setrlimit(resource.RLIMIT_DATA, (min([self._before + self._room, *others]), self._limits[1]))

    def lift(self) -> None:
        """The call has ended. The first statement allocates nothing: there may be nothing left."""
        resource.setrlimit(resource.RLIMIT_DATA, self._limits)
        self._kept += _data_bytes() - self._before

    def much_is_kept(self) -> bool:
        """Whether calls have left more than half as much allocated, in caches say, as one may allocate."""
        return self._kept > self._room // 2


def _data_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[5]) * _PAGE
