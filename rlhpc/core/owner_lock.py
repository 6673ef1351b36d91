"""Locks for file systems without flock: a file names the owner, who renews it as long as it holds the lock.

Such file systems return ENOSYS or ENOTSUP. Beside the file to lock are files ``.lock.owner-N`` with increasing numbers.
The highest has the owner. A process that finds it released or abandoned creates the next number exclusively, so that
only one of several gets the lock.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import tempfile
import threading
import time
from pathlib import Path

from rlhpc.core.process import ProcessId

NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP)
_RENEW_SECONDS = 10.0
# Without renewal: more than a file server's failover, in which the owner cannot renew it.
_ABANDONED_SECONDS = 300.0
_BOOT = Path("/proc/sys/kernel/random/boot_id")


class OwnerLock:
    """A lock that this process holds until ``close``, or until it ends."""

    def __init__(self, file: Path) -> None:
        self._file, self._closed = file, threading.Event()
        threading.Thread(target=self._renew, name="owner-lock", daemon=True).start()

    def close(self) -> None:
        """Releases the lock. The file stays, so that its number is not used again."""
        if not self._closed.is_set():
            self._closed.set()
            with contextlib.suppress(OSError):
                self._file.write_text("{}")

    def _renew(self) -> None:
        while not self._closed.wait(_RENEW_SECONDS):
            with contextlib.suppress(OSError):
                os.utime(self._file)

    def __enter__(self) -> OwnerLock:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def take(path: Path, *, wait: bool = False) -> OwnerLock | None:
    """The lock of ``path``; None if another process has it, unless ``wait``."""
    while True:
        newest = _newest(path)
        if newest is None or not _is_held(newest[1]):
            mine = (newest[0] if newest else 0) + 1
            if (lock := _create(path, mine)) is not None:
                return lock
        if not wait:
            return None
        time.sleep(0.5)


def is_held(path: Path) -> bool:
    """True if a process has the lock of ``path``."""
    newest = _newest(path)
    return newest is not None and _is_held(newest[1])


def _create(path: Path, number: int) -> OwnerLock | None:
    """The lock with this number; None if another process was faster."""
    file = _file(path, number)
    own = ProcessId.own()
    record = {"machine": machine(), "pid": own.pid, "start": own.start}
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return None
    with open(descriptor, "w") as opened:
        json.dump(record, opened)
    numbers = _numbers(path)
    if max(numbers, default=number) > number:  # the number had been used and removed
        file.unlink()
        return None
    for old in numbers:
        if old < number:
            with contextlib.suppress(OSError):
                _file(path, old).unlink()
    return OwnerLock(file)


def _is_held(file: Path) -> bool:
    try:
        text, changed = file.read_text(), file.stat().st_mtime
    except FileNotFoundError:  # another process has just removed it, and has a later one
        return True
    try:
        record = json.loads(text)
        process = ProcessId(int(record["pid"]), int(record["start"])) if record else None
        here = bool(record) and record["machine"] == machine()
    except (ValueError, LookupError, TypeError):  # it is being written
        return _now(file.parent) - changed < _ABANDONED_SECONDS
    if process is None:
        return False
    return process.is_alive() if here else _now(file.parent) - changed < _ABANDONED_SECONDS


def _newest(path: Path) -> tuple[int, Path] | None:
    numbers = _numbers(path)
    return (max(numbers), _file(path, max(numbers))) if numbers else None


def _numbers(path: Path) -> list[int]:
    pattern = re.compile(re.escape(f"{path.name}.owner-") + r"(\d+)")
    return [int(match[1]) for name in os.listdir(path.parent) if (match := pattern.fullmatch(name))]


def _file(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.owner-{number}")


def machine() -> str:
    """This machine, its boot, and its processes' name space: pids mean nothing elsewhere."""
    return f"{_BOOT.read_text().strip()} {os.readlink('/proc/self/ns/pid')}"


def _now(folder: Path) -> float:
    """Time by the clock of the file system, which dates the files; by this machine's where nothing can be written."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            return os.fstat(file.fileno()).st_mtime
    except OSError:
        return time.time()
