"""Lock that admits one process at a time to a run's trackers: two would send a step twice."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator

from rlhpc.core import owner_lock
from rlhpc.core.files import make_folder
from rlhpc.core.folder import RunFolder


@contextlib.contextmanager
def held(folder: RunFolder) -> Iterator[bool]:
    """Whether the lock was free; it is held in the context, or until this process ends."""
    make_folder(folder.trackers.path)
    descriptor = os.open(folder.trackers.lock, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        except OSError as error:
            if error.errno not in owner_lock.NO_LOCKS:
                raise
            lock = owner_lock.take(folder.trackers.lock)
            with lock or contextlib.nullcontext():
                yield lock is not None
        else:
            yield True
    finally:
        os.close(descriptor)
