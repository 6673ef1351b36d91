"""Serves a folder with a late view of it: ``python -m tests.convert.late_files SOURCE MOUNT SECONDS``.

As over NFS, names and attributes are looked up once per folder and used for SECONDS, names that did not exist included.
A process sees what goes through its own mount at once, and an opened file as it is. Locks do not reach other mounts.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

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


def _late(source: Path, seconds: float) -> Any:
    from tests.slurm.faulty_files import Through, attributes

    def found(path: str) -> dict[str, Any]:
        status = os.lstat(path)
        return {**attributes(status), "st_ino": status.st_ino}

    class Late(Through):
        """``views``: names and attributes in a folder, and when they were looked up."""

        views: dict[str, tuple[float, dict[str, dict[str, Any]]]] = {}  # noqa: RUF012

        def _view(self, folder: str) -> dict[str, dict[str, Any]]:
            at, names = self.views.get(folder, (-1e9, {}))
            if time.monotonic() - at < seconds:
                return names
            names = {}
            for name in os.listdir(self._real(folder)):
                with contextlib.suppress(FileNotFoundError):
                    names[name] = found(f"{self._real(folder)}/{name}")
            self.views[folder] = time.monotonic(), names
            return names

        def _changed(self, path: str) -> None:
            """Shows this mount what it has done itself."""
            folder, _, name = path.rpartition("/")
            names = self.views.get(folder or "/", (0.0, {}))[1]
            try:
                names[name] = found(self._real(path))
            except OSError:
                names.pop(name, None)

        def getattr(self, path: str, handle: int | None = None) -> dict[str, Any]:
            if handle is not None or path == "/":
                return super().getattr(path, handle)
            folder, _, name = path.rpartition("/")
            attributes = self._view(folder or "/").get(name)
            if attributes is None:
                raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))
            return attributes

        def readdir(self, path: str, _handle: int) -> list[tuple[str, dict[str, Any], int]]:
            here = {name: found(self._real(path)) for name in (".", "..")}
            return [(name, attributes, 0) for name, attributes in (*here.items(), *self._view(path).items())]

        def create(self, path: str, mode: int, flags: int | None = None) -> int:
            exclusive = (flags or 0) & (os.O_EXCL | os.O_TRUNC)
            handle = os.open(self._real(path), os.O_RDWR | os.O_CREAT | exclusive, mode)
            self._changed(path)
            return handle

        def rename(self, old: str, new: str) -> int:
            os.rename(self._real(old), self._real(new))
            for folder in [folder for folder in self.views if f"{folder}/".startswith((f"{old}/", f"{new}/"))]:
                del self.views[folder]
            self._changed(old)
            self._changed(new)
            return 0

    def shown(name: str) -> Callable[..., Any]:
        act = getattr(Through, name)

        def call(self: Late, path: str, *arguments: Any) -> Any:
            result = act(self, path, *arguments)
            self._changed(path)
            return result

        return call

    for name in ("open", "write", "truncate", "release", "fsync", "mkdir", "rmdir", "unlink", "chmod", "utimens"):
        setattr(Late, name, shown(name))
    return Late(source)


if __name__ == "__main__":
    main(*sys.argv[1:])
