"""Private folders for temporary files.

They are removed at any depth. Those of processes that were killed are found by their lock, which the kernel frees.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import stat
import time
from collections.abc import Callable

OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
NEW_SECONDS = 60.0  # in which a folder may not be locked yet
_REMOVE_SECONDS = 5.0  # for one folder; the rest is left to the next process that removes it


def is_new(found: os.stat_result) -> bool:
    """True if a process may be about to lock the folder."""
    return time.time() - found.st_ctime < NEW_SECONDS


def remove_unheld(path: str, keep: Callable[[os.stat_result], bool] = is_new) -> None:
    """Removes a folder of this user, unless a process holds a lock on it or ``keep`` is true of its status."""
    with contextlib.suppress(OSError):
        found = os.lstat(path)
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or keep(found):
            return
        with contextlib.suppress(OSError):
            os.chmod(path, stat.S_IMODE(found.st_mode) | 0o700)  # a program of this user can close it
        folder = os.open(path, OPEN)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            remove(path)
        finally:
            os.close(folder)


def remove(path: str) -> None:
    """Removes a folder; what cannot be removed in time stays. Subfolders are moved up first: no depth is too much."""
    deadline = time.monotonic() + _REMOVE_SECONDS
    with contextlib.suppress(OSError):
        top = os.open(path, OPEN)
        try:
            waiting = _clear(top, top)
            while waiting and time.monotonic() < deadline:
                name = waiting.pop()
                with contextlib.suppress(OSError):
                    folder = os.open(name, OPEN, dir_fd=top)
                    try:
                        waiting += _clear(folder, top)
                    finally:
                        os.close(folder)
                    os.rmdir(name, dir_fd=top)
        finally:
            os.close(top)
        os.rmdir(path)


def _clear(folder: int, top: int) -> list[str]:
    """Removes the files of a folder and moves its subfolders to ``top``; returns their new names."""
    moved = []
    for name in os.listdir(folder):
        with contextlib.suppress(OSError):
            try:
                os.unlink(name, dir_fd=folder)
            except IsADirectoryError:
                if os.geteuid():  # moving and opening it needs its permissions; root needs none
                    os.chmod(name, 0o700, dir_fd=folder)
                new = f"removed-{secrets.token_hex(8)}"
                os.rename(name, new, src_dir_fd=folder, dst_dir_fd=top)
                moved.append(new)
    return moved
