"""Serves a FaultyDisk: ``python -m tests.slurm.faulty_files SOURCE MOUNT`` reads its states from standard input."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mfusepy

from tests.slurm.faulty_disk import State

_OPEN_FOR_WRITING = os.O_WRONLY | os.O_RDWR


def attributes(stat: os.stat_result) -> dict[str, Any]:
    names = ("st_gid", "st_mode", "st_nlink", "st_size", "st_uid", "st_blocks")
    times = {name: getattr(stat, f"{name}_ns") for name in ("st_atime", "st_ctime", "st_mtime")}
    return {**{name: getattr(stat, name) for name in names}, **times}


class Through(mfusepy.Operations):
    """Operations on the files of ``source``, in the state that ``state`` has."""

    use_ns = True

    def __init__(self, source: Path) -> None:
        self.state = State()
        self._source = str(source)
        self._synced: dict[str, int] = {}  # bytes of files that a failed fsync does not lose
        for name, operation in list(vars(type(self)).items()):
            if callable(operation) and not name.startswith("_"):
                setattr(self, name, self._failing(name, operation.__get__(self)))

    def _failing(self, name: str, operation: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: str, *arguments: Any) -> Any:
            state = self.state
            time.sleep(state.delay)
            opens_for_writing = name == "open" and arguments[0] & _OPEN_FOR_WRITING
            if state.fails("write" if opens_for_writing else name):
                if name == "fsync":
                    os.ftruncate(arguments[-1], self._synced.get(path, 0))
                raise mfusepy.FuseOSError(state.number)
            return operation(path, *arguments)

        return call

    def _real(self, path: str) -> str:
        return self._source + path

    def getattr(self, path: str, handle: int | None = None) -> dict[str, Any]:
        return attributes(os.lstat(self._real(path)) if handle is None else os.fstat(handle))

    def readdir(self, path: str, _handle: int) -> list[str]:
        return [".", "..", *os.listdir(self._real(path))]

    def readlink(self, path: str) -> str:
        return os.readlink(self._real(path))

    def statfs(self, path: str) -> dict[str, int]:
        found = os.statvfs(self._real(path))
        return {name: getattr(found, name) for name in dir(found) if name.startswith("f_") and name != "f_fsid"}

    def open(self, path: str, flags: int) -> int:
        handle = os.open(self._real(path), flags & ~(os.O_DIRECT | os.O_CREAT | os.O_EXCL))
        self._synced.setdefault(path, os.fstat(handle).st_size)
        return handle

    def create(self, path: str, mode: int, _flags: int | None = None) -> int:
        self._synced[path] = 0
        return os.open(self._real(path), os.O_RDWR | os.O_CREAT, mode)

    def read(self, _path: str, size: int, offset: int, handle: int) -> bytes:
        return os.pread(handle, size, offset)

    def write(self, _path: str, data: bytes, offset: int, handle: int) -> int:
        return os.pwrite(handle, data, offset)

    def truncate(self, path: str, length: int, handle: int | None = None) -> int:
        os.truncate(self._real(path) if handle is None else handle, length)
        self._synced[path] = min(length, self._synced.get(path, length))
        return 0

    def release(self, _path: str, handle: int) -> int:
        os.close(handle)
        return 0

    def fsync(self, path: str, _data_only: int, handle: int) -> int:
        os.fsync(handle)
        self._synced[path] = os.fstat(handle).st_size
        return 0

    def mkdir(self, path: str, mode: int) -> int:
        os.mkdir(self._real(path), mode)
        return 0

    def rmdir(self, path: str) -> int:
        os.rmdir(self._real(path))
        return 0

    def unlink(self, path: str) -> int:
        os.unlink(self._real(path))
        self._synced.pop(path, None)
        return 0

    def rename(self, old: str, new: str) -> int:
        os.rename(self._real(old), self._real(new))
        self._synced[new] = self._synced.pop(old, 0)
        return 0

    def symlink(self, target: str, source: str) -> int:
        os.symlink(source, self._real(target))
        return 0

    def link(self, target: str, source: str) -> int:
        os.link(self._real(source), self._real(target))
        return 0

    def chmod(self, path: str, mode: int) -> int:
        os.chmod(self._real(path), mode)
        return 0

    def chown(self, path: str, user: int, group: int) -> int:
        os.chown(self._real(path), user, group)
        return 0

    def utimens(self, path: str, times: tuple[int, int] | None = None) -> int:
        os.utime(self._real(path), ns=times or (time.time_ns(), time.time_ns()))
        return 0


def main(source: str, mount: str) -> None:
    """Serves until it is unmounted."""
    files = Through(Path(source))

    def listen() -> None:
        for line in sys.stdin:
            files.state = State.of(line)
            print("taken", flush=True)

    threading.Thread(target=listen, daemon=True).start()
    options = {"allow_other": True, "default_permissions": True, "attr_timeout": 0, "entry_timeout": 0}
    mfusepy.FUSE(files, mount, foreground=True, **options)


if __name__ == "__main__":
    main(*sys.argv[1:])
