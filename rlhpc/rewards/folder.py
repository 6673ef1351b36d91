"""Private folders and users of programs that run without namespaces.

The outer folder belongs to the worker, which holds a lock on it; the program's own folder is below it. A folder whose
lock is free was left by a worker that was killed, and the next worker removes it. Programs never run as root.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from rlhpc.core.scratch import OPEN, remove, remove_unheld
from rlhpc.rewards import kernel

_MIB = 1 << 20
_MOST_DEPTH = 100  # of subfolders: the time of a measurement grows with depth
INSIDE = 1000  # the program's user, inside its namespace
_NOBODY = 65534


@contextlib.contextmanager
def private_folder(owner: int | None) -> Iterator[str]:
    """A folder that only this user, or ``owner``, can enter; removed at the end."""
    outer = tempfile.mkdtemp(prefix=_prefix())
    lock = os.open(outer, OPEN)
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


def sweep() -> None:
    """Removes the folders of workers of this user that were killed on this node, unless they are new."""
    with contextlib.suppress(OSError), os.scandir(tempfile.gettempdir()) as entries:
        for entry in entries:
            if entry.name.startswith(_prefix()):
                remove_unheld(entry.path)


class Meter:
    """Measures a program's folder, with the deleted files that the program holds."""

    def __init__(self, path: str, process: int, mib: int, entries: int) -> None:
        self._path, self._process, self._most, self._entries = path, process, mib * _MIB, entries
        self._held_seen = False  # whether this process may see what the program holds

    def exceeds(self, file_mib: int) -> bool:
        """True if the folder is too large or has too many entries, or cannot be measured because of its depth or
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


def other_user() -> int:
    """User and group for programs of root: nobody, or the largest id of its namespace; 0 if root is the only one."""
    return min(_NOBODY, _largest_id("uid_map"), _largest_id("gid_map"))


def map_users(process: int) -> None:
    """Maps users into the namespace of ``process``. Root's programs run as nobody: limits do not apply to root."""
    own = (os.geteuid(), os.getegid())
    other = other_user() if own[0] == 0 else 0
    if other:
        maps = [f"0 {one} 1\n{INSIDE} {other} 1" for one in own]
    else:
        maps = [f"{INSIDE} {one} 1" for one in own]
        Path(f"/proc/{process}/setgroups").write_text("deny")
    for name, lines in zip(("uid_map", "gid_map"), maps, strict=True):
        Path(f"/proc/{process}/{name}").write_text(lines)


def program_user() -> int | None:
    """The user that programs of this process become without namespaces; None for its own.

    Raises an OSError for a root that cannot give up what it may do.
    """
    if os.geteuid():
        return None
    other = other_user()
    if other:
        return other
    if _is_root_outside():
        raise PermissionError("root's programs run as nobody, which this user namespace does not have")
    return None  # an ordinary user who is root only here


def become(user: int) -> None:
    """Changes user and group for good, and with them loses all capabilities."""
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)


def give_up_rights(user: int | None) -> None:
    """Becomes ``user``, if there is one, and drops all capabilities, for good."""
    kernel.bound_capabilities()
    try:
        if user is not None:
            become(user)
    except OSError as error:
        raise PermissionError(f"root's programs run as nobody, and root may not become nobody here: {error}") from None
    kernel.drop_capabilities()


def _is_root_outside() -> bool:
    """True if the namespace's root is root where it was created, or may be."""
    lines = [line.split() for line in Path("/proc/self/uid_map").read_text().splitlines()]
    return not any(int(inner) == 0 != int(outer) for inner, outer, _ in lines)


def _largest_id(name: str) -> int:
    """The largest id in this process's own namespace."""
    lines = Path(f"/proc/self/{name}").read_text().splitlines()
    return max(int(line.split()[0]) + int(line.split()[2]) - 1 for line in lines)
