"""Writes a part of a file sequentially, bypassing the page cache if the file system allows it.

Direct writes save the copy into the kernel's memory, which is useless for gigabytes that nobody reads soon: they reach
the disk's speed, and are on it when the call returns. A thread makes them, while the next buffers are filled.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

_BLOCK = 4096  # alignment of offsets, lengths and memory that direct writes require on any disk
_BUFFER = 8 << 20
_BUFFERS = 6  # of a stream: a chunk of 32 MiB is handed over while the one before is written
_spare: list[memoryview] = []  # of this process, for the next stream: new pages from the kernel cost more than a copy


class Stream:
    """Context manager to write into ``path``, while other processes may write other parts; flushes to disk at its
    end."""

    def __init__(self, path: Path, *, truncate: bool) -> None:
        self._plain = os.open(path, os.O_WRONLY | os.O_CREAT | (os.O_TRUNC if truncate else 0), 0o666)
        self._direct = _open_direct(path)
        self._buffer = _take_buffer()
        self._thread: ThreadPoolExecutor | None = None  # after the first full buffer
        self._pending: deque[tuple[Future[None], memoryview]] = deque()
        self._start = 0  # offset of the buffer in the file
        self._filled = 0

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._flush()
                self._wait()
                os.fdatasync(self._plain)
        finally:
            if self._thread is not None:
                self._thread.shutdown()
            _spare.extend([self._buffer, *(buffer for _, buffer in self._pending)])
            for descriptor in (self._plain, self._direct):
                if descriptor is not None:
                    os.close(descriptor)

    @property
    def at(self) -> int:
        """Offset of the next byte in the file."""
        return self._start + self._filled

    def seek(self, at: int) -> None:
        """Continues at another offset."""
        if at != self.at:
            self._flush()
            self._start = at

    def write(self, data: bytes | memoryview) -> None:
        """Writes at the current offset."""
        view = memoryview(data)
        while len(view):
            room = self._room()
            part, view = view[:room], view[room:]
            self._buffer[self._filled : self._filled + len(part)] = part
            self._filled += len(part)
            if len(part) == room:
                self._flush()

    def flush(self) -> None:
        """Does nothing: torch.save calls it, and the end flushes to disk."""

    def _room(self) -> int:
        """Bytes up to the next block after an unaligned start, or up to the buffer's end."""
        uneven = self._start % _BLOCK
        return (_BLOCK - uneven if uneven else _BUFFER) - self._filled

    def _flush(self) -> None:
        """Writes the buffer, a full one in the thread."""
        if self._filled < len(self._buffer):
            self._wait()
            self._write_out(self._buffer[: self._filled], self._start)
        else:
            self._wait(_BUFFERS - 2)
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1)
            self._pending.append((self._thread.submit(self._write_out, self._buffer, self._start), self._buffer))
            self._buffer = _take_buffer()
        self._start, self._filled = self.at, 0

    def _wait(self, most: int = 0) -> None:
        """Waits until at most so many buffers are left to the thread; raises what it raised."""
        while len(self._pending) > most:
            self._pending[0][0].result()
            _spare.append(self._pending.popleft()[1])

    def _write_out(self, data: memoryview, at: int) -> None:
        """Writes whole blocks directly, and an unaligned start or end through the page cache."""
        done = 0
        if self._direct is not None and at % _BLOCK == 0:
            done = _write_blocks(self._direct, data[: len(data) - len(data) % _BLOCK], at)
        while done < len(data):
            done += os.pwrite(self._plain, data[done:], at + done)


def _take_buffer() -> memoryview:
    """A page-aligned buffer."""
    while _spare:
        buffer = _spare.pop()
        if len(buffer) == _BUFFER:
            return buffer
    # Private: a forked process that takes the same buffer must not write into this one's.
    return memoryview(mmap.mmap(-1, _BUFFER, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


def _open_direct(path: Path) -> int | None:
    """Descriptor for direct writes; None if the file system has none, as some in memory or over networks."""
    try:
        return os.open(path, os.O_WRONLY | os.O_DIRECT)
    except OSError:
        return None


def _write_blocks(descriptor: int, data: memoryview, at: int) -> int:
    """Number of bytes that the file system accepted as direct writes; the rest goes through the page cache."""
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
