"""Worker process that calls reward functions one at a time. Imports no torch, unless a function's module does.

Receives lists of calls through one pipe and sends each outcome through another; ends with the pipe or with its parent.
The kernel limits the private writable memory (RLIMIT_DATA) of each call. It does not limit address space, of which
libraries such as PyTorch reserve far more than they use.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rlhpc.core.errors import UserError
from rlhpc.core.imports import import_attribute
from rlhpc.core.redaction import guard_output, learn
from rlhpc.rewards.calls import Entry, Retired, described, failure_of
from rlhpc.rewards.kernel import die_with_parent

# Signals that ask a rank to save and stop, or that a terminal sends. The rank ends its workers itself.
_IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)

_MIB = 1 << 20
_PAGE = resource.getpagesize()


def main(parent: int, reading: int, writing: int) -> None:
    """Entry point; ``reading`` and ``writing`` are descriptors of pipes to the process ``parent``."""
    guard_output()
    for signum in _IGNORED:
        signal.signal(signum, signal.SIG_IGN)
    die_with_parent()
    if os.getppid() != parent:  # the parent ended before that call
        return
    inheritable = False
    for descriptor in (reading, writing):
        os.set_inheritable(descriptor, inheritable)
    with contextlib.suppress(OSError):  # if the node runs out of memory, the kernel kills this process, not the rank
        Path("/proc/self/oom_score_adj").write_text("1000")
    try:
        _serve(Connection(reading, writable=False), Connection(writing, readable=False))
    except (EOFError, BrokenPipeError):
        pass
    finally:
        os._exit(0)  # without waiting for the functions' threads


def _serve(inbox: Connection, outbox: Connection) -> None:
    entries: list[Entry] = inbox.recv()
    learn([entry.arguments for entry in entries])
    functions = []
    for entry in entries:
        try:
            functions.append(import_attribute(entry.loader, entry.where)(entry))
        except UserError as error:
            return outbox.send(error)
        except BaseException as error:  # importing a module may raise anything
            return outbox.send(
                UserError(f"{entry.path} {described(error)}", where=entry.where, remedy="fix its module")
            )
    bounds = [None if entry.memory_limit_mib is None else MemoryBound(entry.memory_limit_mib) for entry in entries]
    outbox.send(None)
    while True:
        for index, keywords in inbox.recv():
            bound = bounds[index]
            outbox.send(functions[index](keywords) if bound is None else _bounded(bound, functions[index], keywords))
            if bound is not None and entries[index].built_in and bound.has_leaked():
                return outbox.send(Retired())


def _bounded(bound: MemoryBound, function: Callable[[Any], Any], keywords: Any) -> Any:
    bound.enforce()
    try:
        outcome = function(keywords)
    except MemoryError as error:  # the call's allocations live until here and may leave no memory
        bound.lift()
        return failure_of(error, bound.mib)
    bound.lift()
    return outcome


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
        """True if past calls have left more than half of one call's limit allocated, for example in caches."""
        return self._leaked > self._room // 2


def _data_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[5]) * _PAGE
