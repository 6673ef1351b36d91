"""A process that calls reward functions, one after the other. It imports no torch, unless a function's module does.

It takes lists of calls from one pipe and answers each of them in another; it ends with the pipe or with its parent.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rlhpc.core.errors import UserError
from rlhpc.core.imports import import_attribute
from rlhpc.rewards.calls import Entry, Retired, failure_of, told
from rlhpc.rewards.kernel import die_with_parent
from rlhpc.rewards.memory import MemoryBound

# What asks a rank to save and end, or ends a program at a terminal. The rank decides what becomes of its workers.
_IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def main(parent: int, reading: int, writing: int) -> None:
    """``reading`` and ``writing`` are descriptors of pipes to the process ``parent``."""
    for signum in _IGNORED:
        signal.signal(signum, signal.SIG_IGN)
    die_with_parent()
    if os.getppid() != parent:  # it ended before that
        return
    for descriptor in (reading, writing):
        os.set_inheritable(descriptor, False)
    with contextlib.suppress(OSError):  # where memory runs out, this process goes before the rank does
        Path("/proc/self/oom_score_adj").write_text("1000")
    try:
        _serve(Connection(reading, writable=False), Connection(writing, readable=False))
    except (EOFError, BrokenPipeError):
        pass
    finally:
        os._exit(0)  # threads of the functions are not waited for


def _serve(inbox: Connection, outbox: Connection) -> None:
    entries: list[Entry] = inbox.recv()
    functions = []
    for entry in entries:
        try:
            functions.append(import_attribute(entry.loader, entry.where)(entry))
        except UserError as error:
            return outbox.send(error)
        except BaseException as error:  # a module may raise anything when it is imported
            return outbox.send(UserError(f"{entry.path} {told(error)}", where=entry.where, remedy="mend its module"))
    bounds = [None if entry.memory_limit_mib is None else MemoryBound(entry.memory_limit_mib) for entry in entries]
    outbox.send(None)
    while True:
        for index, keywords in inbox.recv():
            bound = bounds[index]
            outbox.send(functions[index](keywords) if bound is None else _bounded(bound, functions[index], keywords))
            if bound is not None and entries[index].built_in and bound.much_is_kept():
                return outbox.send(Retired())


def _bounded(bound: MemoryBound, function: Callable[[Any], Any], keywords: Any) -> Any:
    bound.enforce()
    try:
        outcome = function(keywords)
    except MemoryError as error:  # what the call has allocated lives until here, and leaves none to handle its own
        bound.lift()
        return failure_of(error, bound.mib)
    bound.lift()
    return outcome
