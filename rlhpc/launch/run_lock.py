"""Lock that admits one launcher at a time to a run folder."""

from __future__ import annotations

import fcntl
import io
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

from rlhpc.core import owner_lock
from rlhpc.core.errors import UserError
from rlhpc.core.folder import RunFolder
from rlhpc.core.owner_lock import OwnerLock
from rlhpc.core.storage import patiently


@contextmanager
def locked(folder: RunFolder, *, wait: bool = False) -> Iterator[None]:
    """Context that keeps other launchers out of the folder, which must exist; the lock ends with this process.

    Raises UserError if another launcher has it, unless ``wait``.
    """
    operation = fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB)
    for pause in (0.05, 0.05, 0.0):  # `is_locked` has the lock for a moment
        file = patiently(lambda: _lock(folder, "w", operation), folder.lock)
        if file is not None:
            break
        time.sleep(pause)
    if file is None:
        raise UserError(
            f"another rlhpc is running in {str(folder.path)!r}",
            where="run_dir",
            remedy="wait for it, or choose another folder with --run-dir",
        )
    with file:
        yield


def is_locked(folder: RunFolder) -> bool:
    """True if a launcher works in the folder."""
    try:
        file = patiently(lambda: _lock(folder, "r", fcntl.LOCK_SH | fcntl.LOCK_NB), folder.lock)
    except FileNotFoundError:
        return False
    if file is not None:
        file.close()
    return file is None


def _lock(folder: RunFolder, mode: str, operation: int) -> IO[str] | OwnerLock | None:
    """The locked file; None if another process has the lock. On a file system without locks, by a file of its owner."""
    file = open(folder.lock, mode)  # noqa: SIM115 - the lock lasts until it is closed
    try:
        fcntl.flock(file, operation)
    except BaseException as error:
        file.close()
        if isinstance(error, BlockingIOError):
            return None
        if not isinstance(error, OSError) or error.errno not in owner_lock.NO_LOCKS:
            raise
        if operation & fcntl.LOCK_SH:  # only looks
            return None if owner_lock.is_held(folder.lock) else io.StringIO()
        return owner_lock.take(folder.lock, wait=not operation & fcntl.LOCK_NB)
    return file
