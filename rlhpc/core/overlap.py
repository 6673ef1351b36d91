"""Checks whether one folder is another or is inside it. Compares inodes: links and bind mounts give many names."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path


def resolved(path: Path) -> Path:
    """The absolute path without symbolic links; the last parts need not exist."""
    return Path(os.path.realpath(path))


def is_same(one: Path, other: Path) -> bool:
    """Whether both exist and are the same file or folder."""
    first, second = _status(one), _status(other)
    return first is not None and second is not None and _alike(first, second)


def contains(folder: Path, path: Path) -> bool:
    """Whether ``path``, which need not exist, is ``folder`` or inside it."""
    status = _status(folder)
    return status is not None and any(_alike(status, found) for found in _existing(resolved(path)))


def _existing(path: Path) -> Iterator[os.stat_result]:
    for folder in (path, *path.parents):
        status = _status(folder)
        if status is not None:
            yield status


def _status(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except OSError:
        return None


def _alike(one: os.stat_result, other: os.stat_result) -> bool:
    """Whether two files are one. A network file system mounted twice may have two device numbers; times decide then."""
    if one.st_ino != other.st_ino:
        return False
    return one.st_dev == other.st_dev or (one.st_ctime_ns, one.st_mtime_ns) == (other.st_ctime_ns, other.st_mtime_ns)
