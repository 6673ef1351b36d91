"""Classifies file-system errors, and waits for those that pass.

A network file system that fails over returns EIO, ESTALE or a timeout for seconds to minutes and then works again.
Every access to the run folder goes through ``patiently``, so that such a failure delays a run but does not end it.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import struct
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from rlhpc.core.text import printable

Kind = Literal["transient", "full", "permanent"]
T = TypeVar("T")

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
# NFS and SMB lose their server (EIO, ETIMEDOUT, EHOSTDOWN) or a file's handle (ESTALE), Lustre and Ceph evict a client
# (EIO, ENOTCONN, ESHUTDOWN), locks have a grace period (ENOLCK), and a volume that fails over is read-only meanwhile.
_TRANSIENT = frozenset(
    {
        errno.EIO,
        errno.EREMOTEIO,
        errno.ESTALE,
        errno.EROFS,
        errno.EAGAIN,
        errno.ENOLCK,
        errno.ETIMEDOUT,
        errno.ECOMM,
        errno.ENOTCONN,
        errno.ESHUTDOWN,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
        errno.ENETDOWN,
        errno.ENETUNREACH,
    }
)
_FIRST_PAUSE, _LONGEST_PAUSE, _SLICE = 0.1, 5.0, 0.2


class StorageError(OSError):
    """A transient error that lasted longer than the wait for it. Not the user's fault."""


def kind_of(error: OSError) -> Kind:
    """Kind of an error. ``transient``: passes by itself. ``full``: no space or quota. ``permanent``: anything else,
    such as a path or permission that the user must correct."""
    if error.errno in _TRANSIENT:
        return "transient"
    return "full" if error.errno in _FULL else "permanent"


def _never() -> bool:
    return False


@dataclass(frozen=True)
class Patience:
    """Maximum waits in seconds for a transient error and for a full disk. All waits end when ``give_up`` is true."""

    transient_seconds: float = 300.0
    full_seconds: float = 0.0
    give_up: Callable[[], bool] = _never


NONE, BRIEF = Patience(0.0), Patience(10.0)
_patience = Patience()
_waits = mmap.mmap(-1, 8)  # shared with forked processes, such as the writers of a checkpoint


def use(patience: Patience) -> None:
    """Sets the patience of this process."""
    global _patience
    _patience = patience


def waits() -> bytes:
    """A value that changes while this process, or one that it forked, waits for storage."""
    return _waits[:]


def patiently(action: Callable[[], T], path: Path | str = "", patience: Patience | None = None) -> T:
    """Result of ``action``, which is repeated while the file system has transient errors.

    ``action`` must open files by path each time, because handles become stale, and give the same result if an earlier
    try succeeded in fact. ``path``: named in messages if an error names none. When ``patience`` (by default the
    process's) is exhausted, a transient error is raised as StorageError, others as they are.
    """
    wait = _Wait(str(path), patience or _patience)
    while True:
        try:
            result = action()
        except StorageError:  # a wait of its own has ended
            raise
        except OSError as error:
            wait.after(error)
        else:
            wait.end()
            return result


def exists(path: Path, patience: Patience | None = None, *, follow_symlinks: bool = True) -> bool:
    """True if ``path`` exists. Some versions of ``Path.exists`` return False for an error."""

    def look() -> bool:
        try:
            os.stat(path, follow_symlinks=follow_symlinks)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    return patiently(look, path, patience)


def as_storage_error(error: OSError, waited: float = 0.0, path: str = "") -> OSError:
    """A transient error as StorageError, any other as it is."""
    if kind_of(error) != "transient" or isinstance(error, StorageError):
        return error
    words = f"{error.strerror or error}" + (f" (for {waited:.0f} s)" if waited >= 1 else "")
    found = StorageError(error.errno, words, error.filename or path or None)
    found.__cause__ = error
    return found


def os_error_in(error: BaseException) -> OSError | None:
    """The OSError that an error is or was caused by: libraries that write archives raise their own on top."""
    found: BaseException | None = error
    while found is not None and not isinstance(found, OSError):
        found = found.__cause__ or found.__context__
    return found


def say(text: str) -> None:
    """Prints a line on stderr, which may be a file on the failing file system."""
    with contextlib.suppress(OSError, ValueError):
        print(f"rlhpc: {printable(text)}", file=sys.stderr, flush=True)


class _Wait:
    """Wait of one action, from its first error on."""

    def __init__(self, path: str, patience: Patience) -> None:
        self._path, self._patience = path, patience
        self._began: float | None = None
        self._pause = _FIRST_PAUSE

    def after(self, error: OSError) -> None:
        """Pauses, or raises the error if it is permanent or has lasted too long."""
        kind = kind_of(error)
        limit = {"transient": self._patience.transient_seconds, "full": self._patience.full_seconds}.get(kind, 0.0)
        now = time.monotonic()
        waited = now - self._began if self._began is not None else 0.0
        if waited >= limit or self._patience.give_up():
            raise as_storage_error(error, waited, self._path)
        if self._began is None:
            self._began = now
            self._path = str(error.filename or self._path)
            longest = "" if limit == float("inf") else f" up to {limit:.0f} s"
            awaited = "space" if kind == "full" else "the file system"
            say(f"{self._path}: {error.strerror or error}; waiting{longest} for {awaited}")
        self._sleep(min(self._pause, limit - waited))
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)

    def end(self) -> None:
        """Reports the end of the wait, if there was one."""
        if self._began is not None:
            say(f"{self._path}: continuing after {time.monotonic() - self._began:.1f} s")

    def _sleep(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0 and not self._patience.give_up():
            (count,) = struct.unpack("Q", _waits[:])
            _waits[:] = struct.pack("Q", (count + 1) % 2**64)
            time.sleep(min(left, _SLICE))
