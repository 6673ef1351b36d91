"""Limits the memory that each call may allocate; enforced by the kernel.

Limits private writable memory (RLIMIT_DATA), not address space, of which libraries such as PyTorch reserve far more
than they use.
"""

from __future__ import annotations

import resource
from pathlib import Path

_MIB = 1 << 20
_PAGE = resource.getpagesize()


class MemoryBound:
    """Limit of ``mib`` MiB per call, in addition to the process's memory when the call begins."""

    def __init__(self, mib: int) -> None:
        self.mib, self._room = mib, mib * _MIB
        self._before = self._leaked = 0
        self._limits = resource.getrlimit(resource.RLIMIT_DATA)  # in force between calls

    def enforce(self) -> None:
        """Begins a call: allocations beyond the limit fail."""
        self._before = _data_bytes()
        others = [limit for limit in self._limits if limit != resource.RLIM_INFINITY]
        resource.setrlimit(resource.RLIMIT_DATA, (min([self._before + self._room, *others]), self._limits[1]))

    def lift(self) -> None:
        """Ends a call. Its first statement allocates nothing, since no memory may be left."""
        resource.setrlimit(resource.RLIMIT_DATA, self._limits)
        self._leaked += _data_bytes() - self._before

    def has_leaked(self) -> bool:
        """Whether past calls have left more than half of one call's limit allocated, for example in caches."""
        return self._leaked > self._room // 2


def _data_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[5]) * _PAGE
