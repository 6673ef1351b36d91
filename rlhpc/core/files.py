"""Files of the run folder: written atomically, read and listed with patience (rlhpc.core.storage).

Folders are compared by inodes, because links and bind mounts give them many names.
"""

from __future__ import annotations

import contextlib
import fnmatch
import json
import os
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

from rlhpc.core.storage import Patience, patiently


def write_atomic(path: Path, text: str | bytes, patience: Patience | None = None, *, private: bool = False) -> None:
    """Writes ``text`` so that a reader sees the old file or the new one, never a part. The folder must exist: making it
    would let ranks write that were fenced off (rlhpc.core.attempts). ``private``: mode 0600 from the first byte."""
    data = text.encode() if isinstance(text, str) else text
    patiently(lambda: _replace(path, data, 0o600 if private else 0o666), path, patience)


def _replace(path: Path, data: bytes, mode: int) -> None:
    """Writes all of the data: after a failed fsync the kernel may have dropped it, so a retry must write it again."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def write_json(path: Path, value: Any, patience: Patience | None = None) -> None:
    """Writes a JSON document atomically, indented, keys in the order given."""
    write_atomic(path, json.dumps(value, indent=2) + "\n", patience)


def read_text(path: Path, patience: Patience | None = None) -> str:
    """Text of a file."""
    return patiently(lambda: path.read_text(encoding="utf-8"), path, patience)


def read_json(path: Path, patience: Patience | None = None) -> Any:
    """JSON document at ``path``."""
    return json.loads(read_text(path, patience))


def names_in(folder: Path, pattern: str = "*", patience: Patience | None = None) -> list[str]:
    """Names in a folder that match a shell pattern, sorted; none if the folder does not exist.

    Some versions of ``Path.glob`` return nothing for an error.
    """

    def read() -> list[str]:
        try:
            return os.listdir(folder)
        except (FileNotFoundError, NotADirectoryError):
            return []

    return sorted(fnmatch.filter(patiently(read, folder, patience), pattern))


def make_folder(path: Path) -> None:
    """Makes a folder in an existing one, unless it exists: a try that reported an error may have made it."""
    patiently(lambda: path.mkdir(exist_ok=True), path)


def rename(source: Path, target: Path) -> None:
    """Renames a file; a try that took effect but reported an error counts."""
    identity = patiently(lambda: os.stat(source).st_ino, source)

    def act() -> None:
        try:
            os.replace(source, target)
        except FileNotFoundError:
            if os.stat(target).st_ino != identity:
                raise

    patiently(act, source)


def remove(path: Path) -> None:
    """Removes a file if it exists."""
    patiently(lambda: path.unlink(missing_ok=True), path)


class LineFile:
    """Appends lines to a file without other writers, each line complete and once.

    The file is opened for each write. A failed write is repeated at the same offset.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._end = patiently(self._size, path)

    def append(self, lines: str) -> None:
        """Appends ``lines``, which end in a newline; they are on disk when it returns."""
        patiently(lambda: self._write(lines.encode()), self._path)

    def _size(self) -> int:
        try:
            return os.stat(self._path).st_size
        except FileNotFoundError:
            return 0

    def _write(self, data: bytes) -> None:
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o666)
        try:
            begin = min(self._end, os.fstat(descriptor).st_size)
            written = 0
            while written < len(data):
                written += os.pwrite(descriptor, data[written:], begin + written)
            os.ftruncate(descriptor, begin + len(data))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        self._end = begin + len(data)


def flush(path: Path) -> None:
    """Flushes a file or folder to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def resolved(path: Path) -> Path:
    """The absolute path without symbolic links; the last parts need not exist."""
    return Path(os.path.realpath(path))


def is_same(one: Path, other: Path) -> bool:
    """True if both exist and are the same file or folder."""
    first, second = _status(one), _status(other)
    return first is not None and second is not None and _alike(first, second)


def contains(folder: Path, path: Path) -> bool:
    """True if ``path``, which need not exist, is ``folder`` or inside it."""
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
    """True if two files are one. A network file system mounted twice may have two device numbers; times decide then."""
    if one.st_ino != other.st_ino:
        return False
    return one.st_dev == other.st_dev or (one.st_ctime_ns, one.st_mtime_ns) == (other.st_ctime_ns, other.st_mtime_ns)


def shipped(name: str) -> Path:
    """Path of a file or folder of the installed package, for example ``configs/demo.yaml``."""
    return Path(str(resources.files("rlhpc") / name))
