"""Serves a folder with a late view of it: ``python -m tests.convert.late_files SOURCE MOUNT SECONDS``.

Names in folders and their attributes are those of SECONDS ago, as NFS may show them; a name that was made since is not
there, a name that was removed is. A process sees at once what goes through its own mount, even if it fails, and an
opened file as it is. Locks do not reach other mounts.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import os
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

_EVERY = 0.02  # seconds between two looks at the folder
ROOT = Path(__file__).parents[2]


@contextlib.contextmanager
def late_mounts(source: Path, mounts: list[Path], seconds: float) -> Iterator[None]:
    """Mounts of ``source``, each with a view of its own. Root only."""
    processes = []
    source.mkdir(exist_ok=True)
    try:
        for mount in mounts:
            mount.mkdir(parents=True, exist_ok=True)
            command = [sys.executable, "-m", "tests.convert.late_files", str(source), str(mount), str(seconds)]
            processes.append(subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL))
        deadline = time.monotonic() + 60
        while not all(map(os.path.ismount, mounts)):
            assert time.monotonic() < deadline, "not mounted"
            time.sleep(0.02)
        yield
    finally:
        for mount in mounts:
            subprocess.run(["umount", "-l", str(mount)], check=False, capture_output=True)
        for process in processes:
            process.kill()
            process.wait()


def possible() -> bool:
    """Whether FUSE can be used here."""
    device = os.access("/dev/fuse", os.R_OK | os.W_OK)
    return importlib.util.find_spec("mfusepy") is not None and os.geteuid() == 0 and device


def main(source: str, mount: str, seconds: str) -> None:
    """Serves until it is unmounted."""
    import mfusepy

    options = {"allow_other": True, "default_permissions": True, "use_ino": True, "nothreads": True}
    kernel = {"attr_timeout": 0, "entry_timeout": 0, "negative_timeout": 0}
    mfusepy.FUSE(_late(Path(source), float(seconds)), mount, foreground=True, **options, **kernel)


Names = dict[str, dict[str, Any]]  # attributes by name


class _Past:
    """What was in a folder and its subfolders ``seconds`` ago, by folder."""

    def __init__(self, root: str, seconds: float) -> None:
        self._root, self._seconds = root, seconds
        self._snapshots: deque[tuple[float, dict[str, Names]]] = deque([(time.monotonic(), self._look())])
        threading.Thread(target=self._follow, daemon=True).start()

    def view(self) -> tuple[float, dict[str, Names]]:
        """The newest snapshot that is old enough, and its time."""
        limit = time.monotonic() - self._seconds
        snapshots = list(self._snapshots)
        return next((snapshot for snapshot in reversed(snapshots) if snapshot[0] <= limit), snapshots[0])

    def _follow(self) -> None:
        while True:
            time.sleep(_EVERY)
            now = time.monotonic()
            self._snapshots.append((now, self._look()))
            while self._snapshots[0][0] < now - 1 - self._seconds:
                self._snapshots.popleft()

    def _look(self) -> dict[str, Names]:
        found: dict[str, Names] = {}
        for folder, folders, files in os.walk(self._root):
            names = found[folder.removeprefix(self._root) or "/"] = {}
            for name in (*folders, *files):
                with contextlib.suppress(FileNotFoundError):
                    names[name] = _attributes(f"{folder}/{name}")
        return found


def _attributes(path: str) -> dict[str, Any]:
    from tests.slurm.faulty_files import attributes

    status = os.lstat(path)
    return {**attributes(status), "st_ino": status.st_ino}


def _late(source: Path, seconds: float) -> Any:
    from tests.slurm.faulty_files import Through

    class Late(Through):
        """``own``: names that this mount has changed or opened, and when; ``trees``: folders that it has made or
        renamed."""

        own: dict[str, float] = {}  # noqa: RUF012
        trees: dict[str, float] = {}  # noqa: RUF012
        past = _Past(str(source), seconds)

        def _names(self, folder: str) -> Names:
            return _names_seen(self, folder)

        def _changed(self, *paths: str, tree: bool = False) -> None:
            self.own.update(dict.fromkeys(paths, time.monotonic()))
            if tree:
                self.trees.update(dict.fromkeys(paths, time.monotonic()))

        def getattr(self, path: str, handle: int | None = None) -> dict[str, Any]:
            if handle is not None or path == "/":
                return super().getattr(path, handle)
            attributes = self._names(_parent(path)).get(path.rpartition("/")[2])
            if attributes is None:
                raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))
            return attributes

        def readdir(self, path: str, _handle: int) -> list[tuple[str, dict[str, Any], int]]:
            here = {name: _attributes(self._real(path)) for name in (".", "..")}
            return [(name, attributes, 0) for name, attributes in (*here.items(), *self._names(path).items())]

        def create(self, path: str, mode: int, flags: int | None = None) -> int:
            exclusive = (flags or 0) & (os.O_EXCL | os.O_TRUNC)
            try:
                return os.open(self._real(path), os.O_RDWR | os.O_CREAT | exclusive, mode)
            finally:
                self._changed(path)

        def mkdir(self, path: str, mode: int) -> int:
            try:
                os.mkdir(self._real(path), mode)
            except FileExistsError:
                self._changed(path)
                raise
            self._changed(path, tree=True)
            return 0

        def rename(self, old: str, new: str) -> int:
            os.rename(self._real(old), self._real(new))
            self._changed(old, new, tree=True)
            return 0

    for name in ("open", "write", "truncate", "release", "fsync", "rmdir", "unlink", "chmod", "utimens"):
        setattr(Late, name, _marking(getattr(Through, name)))
    return Late(source)


def _names_seen(late: Any, folder: str) -> Names:
    """Names and attributes of a folder in the past, but for what the mount has changed or opened itself."""
    at, view = late.past.view()
    above = [folder, *map(str, Path(folder).parents)]
    if any(late.trees.get(path, 0.0) >= at for path in above):
        names = dict.fromkeys(os.listdir(late._real(folder)))
    else:
        names = dict(view.get(folder, {}))
    recent = [path for path, changed in list(late.own.items()) if changed >= at]
    for name in (*names, *(path.rpartition("/")[2] for path in recent if _parent(path) == folder)):
        if names.get(name) is None or f"{folder.rstrip('/')}/{name}" in recent:
            try:
                names[name] = _attributes(f"{late._real(folder)}/{name}")
            except OSError:
                names.pop(name, None)
    return names


def _marking(act: Callable[..., Any]) -> Callable[..., Any]:
    """The operation, after which its mount sees the path as it is."""

    def call(late: Any, path: str, *arguments: Any) -> Any:
        try:
            return act(late, path, *arguments)
        finally:
            late._changed(path)

    return call


def _parent(path: str) -> str:
    return path.rpartition("/")[0] or "/"


if __name__ == "__main__":
    main(*sys.argv[1:])
