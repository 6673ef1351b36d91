"""Writing one part of a file from front to end, past the page cache where the file system allows it.

Gigabytes that nobody reads soon need not be copied into the kernel's memory first: without that a disk takes them
about as fast as they are made, and they are on it when the call returns.
"""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path

_BLOCK = 4096  # what offsets, lengths and memory of direct writes must be multiples of, on every disk
_BUFFER = 8 << 20


class Stream:
    """Writes into ``path``, into which other processes may write elsewhere at the same time. A context, at whose end
    everything is on disk."""

    def __init__(self, path: Path, truncate: bool) -> None:
        self._plain = os.open(path, os.O_WRONLY | os.O_CREAT | (os.O_TRUNC if truncate else 0), 0o666)
        self._direct = _open_direct(path)
        self._buffer = memoryview(mmap.mmap(-1, _BUFFER))  # begins a page
        self._start = 0  # of the buffer's first byte in the file
        self._filled = 0

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._flush()
                os.fdatasync(self._plain)
        finally:
            for descriptor in (self._plain, self._direct):
                if descriptor is not None:
                    os.close(descriptor)

    @property
    def at(self) -> int:
        """Where in the file the next byte goes."""
        return self._start + self._filled

    def seek(self, at: int) -> None:
        """Go on elsewhere in the file."""
        if at != self.at:
            self._flush()
            self._start = at

    def write(self, data: bytes | memoryview) -> None:
        """Append."""
        view = memoryview(data)
        while len(view):
            room = self._room()
            part, view = view[:room], view[room:]
            self._buffer[self._filled : self._filled + len(part)] = part
            self._filled += len(part)
            if len(part) == room:
                self._flush()

    def _room(self) -> int:
        """Up to the next block after an uneven beginning, or to the buffer's end."""
        uneven = self._start % _BLOCK
        return (_BLOCK - uneven if uneven else _BUFFER) - self._filled

    def _flush(self) -> None:
        """Whole blocks directly; an uneven beginning or end as usual."""
        done = 0
        if self._direct is not None and self._start % _BLOCK == 0:
            done = _write_blocks(self._direct, self._buffer[: self._filled - self._filled % _BLOCK], self._start)
        while done < self._filled:
            done += os.pwrite(self._plain, self._buffer[done : self._filled], self._start + done)
        self._start, self._filled = self.at, 0


def _open_direct(path: Path) -> int | None:
    """None where the file system has no direct writes, as some in memory or over networks."""
    try:
        return os.open(path, os.O_WRONLY | os.O_DIRECT)
    except OSError:
        return None


def _write_blocks(descriptor: int, data: memoryview, at: int) -> int:
    """As many as the file system takes so; the others are left to the usual way."""
    done = 0
    while done < len(data):
        try:
            written = os.pwrite(descriptor, data[done:], at + done)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            break
        done += written - written % _BLOCK
        if written % _BLOCK:
            break
    return done
