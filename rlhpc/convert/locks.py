"""Locks of a staging folder, so that two conversions to one target do not repeat each other's work.

They only save work: on some file systems a lock does not reach other nodes. rlhpc.convert.staging is safe without them.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import re
from collections.abc import Iterator
from pathlib import Path

from rlhpc.core import owner_lock
from rlhpc.core.errors import UserError

_NO_FLOCK = (*owner_lock.NO_LOCKS, errno.ENOLCK)
_ALL = "lock"


@contextlib.contextmanager
def locked(folder: Path, share: str = "") -> Iterator[None]:
    """Locks out other conversions to the same target; with a share's name, the same share and those without share.

    Raises UserError if another process has the lock.
    """
    with contextlib.ExitStack() as stack:
        try:
            free = _take_flock(stack, folder, share)
        except OSError as error:
            if error.errno not in _NO_FLOCK:
                raise
            stack.close()
            free = _take_owner_files(stack, folder, share)
        if not free:
            raise UserError("another conversion is writing here", where=str(folder), remedy="wait for it")
        yield


def _take_flock(stack: contextlib.ExitStack, folder: Path, share: str) -> bool:
    """Whether the locks were free. All shares hold the first one together."""
    for name, kind in [(_ALL, fcntl.LOCK_SH if share else fcntl.LOCK_EX), (f"{_ALL}-{share}", fcntl.LOCK_EX)]:
        handle = stack.enter_context((folder / name).open("w"))
        try:
            fcntl.flock(handle, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def _take_owner_files(stack: contextlib.ExitStack, folder: Path, share: str) -> bool:
    """The same where the file system has no flock. Each side takes its own lock and then looks for the others'."""
    lock = owner_lock.take(folder / (f"{_ALL}-{share}" if share else _ALL))
    if lock is None:
        return False
    stack.enter_context(lock)
    others = [folder / _ALL] if share else _locks_of_shares(folder)
    return not any(map(owner_lock.is_held, others))


def _locks_of_shares(folder: Path) -> list[Path]:
    found = (re.fullmatch(rf"({_ALL}-.+)\.owner-\d+", path.name) for path in folder.iterdir())
    return sorted({folder / match[1] for match in found if match})
