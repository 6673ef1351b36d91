"""Private folders of programs that run without namespaces: created, measured, and removed at any depth.

The outer folder belongs to the worker, which holds a lock on it; the program's own folder is below it. A folder whose
lock is free was left by a worker that was killed, and the next worker removes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import stat
import tempfile
import time
from collections.abc import Iterator

_MIB = 1 << 20
_MOST_DEPTH = 100  # of subfolders: the time of a measurement grows with depth
_NEW_SECONDS = 60.0  # in which a folder may not be locked yet
_REMOVE_SECONDS = 5.0  # for one folder; the rest is left to the next worker
_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@contextlib.contextmanager
def private_folder(owner: int | None) -> Iterator[str]:
    """A folder that only this user, or ``owner``, can enter; removed at the end."""
    outer = tempfile.mkdtemp(prefix=_prefix())
    lock = os.open(outer, _OPEN)
    try:
        with contextlib.suppress(OSError):  # a file system without locks on folders: nothing is swept there
            fcntl.flock(lock, fcntl.LOCK_EX)
        inner = os.path.join(outer, "work")
        os.mkdir(inner, 0o700)
        if owner is not None:
            os.chmod(outer, 0o711)
            os.chown(inner, owner, owner)
        yield inner
    finally:
        with contextlib.suppress(OSError):
            os.fchmod(lock, 0o711)  # a program of this user can close it
        remove(outer)
        os.close(lock)


def sweep(new_seconds: float = _NEW_SECONDS) -> None:
    """Removes the folders of workers of this user that were killed on this node, unless newer than ``new_seconds``."""
    top = tempfile.gettempdir()
    with contextlib.suppress(OSError), os.scandir(top) as entries:
        for entry in entries:
            if entry.name.startswith(_prefix()) and entry.is_dir(follow_symlinks=False):
                _sweep(entry.path, new_seconds)


def _sweep(path: str, new_seconds: float) -> None:
    with contextlib.suppress(OSError):
        if os.lstat(path).st_uid != os.geteuid():
            return
        with contextlib.suppress(OSError):
            os.chmod(path, 0o711)
        folder = os.open(path, _OPEN)
        try:
            found = os.fstat(folder)
            if found.st_uid == os.geteuid() and time.time() - found.st_ctime >= new_seconds:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove(path)
        finally:
            os.close(folder)


def remove(path: str) -> None:
    """Removes a folder; what cannot be removed in time stays. Subfolders are moved up first: no depth is too much."""
    deadline = time.monotonic() + _REMOVE_SECONDS
    with contextlib.suppress(OSError):
        top = os.open(path, _OPEN)
        try:
            waiting = _clear(top, top)
            while waiting and time.monotonic() < deadline:
                name = waiting.pop()
                with contextlib.suppress(OSError):
                    folder = os.open(name, _OPEN, dir_fd=top)
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


class Meter:
    """Measures a program's folder, with the deleted files that the program holds."""

    def __init__(self, path: str, process: int, mib: int, entries: int) -> None:
        self._path, self._process, self._most, self._entries = path, process, mib * _MIB, entries
        self._held_seen = False  # whether this process may see what the program holds

    def exceeds(self, file_mib: int) -> bool:
        """Whether the folder is too large or has too many entries, or cannot be measured because of its depth or
        permissions. ``file_mib``: maximum size of a file."""
        try:
            used = _held_bytes(self._process, self._path, file_mib * _MIB)
            self._held_seen = True
        except FileNotFoundError:  # it has ended
            used = 0
        except OSError:  # not for every worker; a program that prevents it exceeds
            used = self._most + 1 if self._held_seen else 0
        left = self._entries
        waiting = [(self._path, 0)]
        while waiting:
            folder, depth = waiting.pop()
            try:
                with os.scandir(folder) as found:
                    for entry in found:
                        left -= 1
                        with contextlib.suppress(FileNotFoundError):
                            used += entry.stat(follow_symlinks=False).st_blocks * 512
                        if entry.is_dir(follow_symlinks=False):
                            waiting.append((entry.path, depth + 1))
                        if left < 0 or used > self._most or depth > _MOST_DEPTH:
                            return True
            except (FileNotFoundError, NotADirectoryError):  # it was removed meanwhile
                continue
            except OSError:  # closed, or a path that is too long
                return True
        return used > self._most


def _held_bytes(process: int, path: str, most: int) -> int:
    """Bytes of deleted files that a process has open or mapped. The size of mapped ones is not to be seen: ``most``."""
    used, open_files = 0, set()
    for descriptor in os.listdir(f"/proc/{process}/fd"):
        with contextlib.suppress(FileNotFoundError):
            found = os.stat(f"/proc/{process}/fd/{descriptor}")
            if stat.S_ISREG(found.st_mode) and found.st_nlink == 0:
                open_files.add(found.st_ino)
                used += found.st_blocks * 512
    with open(f"/proc/{process}/maps", "rb") as file:
        lines = [line.split(None, 5) for line in file if line.endswith(b" (deleted)\n")]
    below = f"{path}/".encode()
    mapped = {int(line[4]) for line in lines if line[5].startswith(below)}
    return used + most * len(mapped - open_files)


def _prefix() -> str:
    return f"rlhpc-sandbox-{os.uname().nodename}-"
