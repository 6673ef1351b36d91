"""Carries a rank's heartbeat to the launcher: through the job's store, by files while that does not answer.

Opening a file is what a shared file system serves least of: a thousand ranks that write a record and look for a request
every few seconds would open a thousand files a second. A message to the store carries both and opens none.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path

from rlhpc.core.store_client import Refused, StoreAddress, StoreConnection
from rlhpc.core.store_protocol import Op, ProtocolError, Status, number

RECORD_BYTES = 1024  # at most; a file has this length
_ANSWER_SECONDS = 5.0  # for the store to accept a connection or to answer; then files are used
_RETRY_SECONDS = (1.0, 30.0)  # first and longest time between attempts to connect


@dataclass(frozen=True)
class Intervals:
    """Seconds between two looks at the file of requests, at least between two writes of a record's file, and between
    two messages to the store."""

    look: float
    write: float
    message: float


class BeatChannel:
    """One rank's channel. ``record``, ``request``: files in place of the store.

    Safe for threads: while one waits for the store, the other uses the files.
    """

    def __init__(self, rank: int, record: Path, request: Path, every: Intervals, store: StoreAddress | None) -> None:
        self._rank, self._record_file, self._request_file, self._address = rank, record, request, store
        self._every = every
        self._connection: StoreConnection | None = None
        self._lock = threading.Lock()
        self._next, self._pause = float("-inf"), _RETRY_SECONDS[0]  # time of the next attempt to connect
        self._request: str | None = None  # that of an answer that has not been taken

    @property
    def has_store(self) -> bool:
        """Whether the job has a store, answering or not."""
        return self._address is not None

    @property
    def look_seconds(self) -> float:
        """Interval between two looks for a request."""
        return self._every.look if self._connection is None else self._every.message

    @property
    def write_seconds(self) -> float:
        """Minimum interval between two records."""
        return self._every.write if self._connection is None else 0.0

    def deliver(self, record: bytes) -> None:
        """Delivers a record. Raises OSError if neither the store takes it nor its file."""
        if not self._ask_store(record):
            write_in_place(self._record_file, record.ljust(RECORD_BYTES - 1) + b"\n")

    def request(self) -> str:
        """Name of the newest request, empty without any. Raises OSError if it cannot be read."""
        if self._request is None and not self._ask_store(b""):
            try:
                return self._request_file.read_text(encoding="utf-8").strip()[:100]
            except (FileNotFoundError, UnicodeDecodeError):
                return ""
        found, self._request = self._request or "", None
        return found

    def _ask_store(self, record: bytes) -> bool:
        """Sends a record, empty without news, and keeps the answer; False if the store does not answer."""
        if self._address is None or not self._lock.acquire(timeout=_ANSWER_SECONDS):
            return False
        try:
            connection = self._connected(self._address)
            if connection is None:
                return False
            fields = [number(self._rank), record]
            status, answer = connection.call(Op.BEAT, fields, grace_seconds=_ANSWER_SECONDS)
            if status != Status.DONE or len(answer) != 1:
                raise ProtocolError("it does not take heartbeats")
            self._request, self._pause = answer[0].decode(errors="replace"), _RETRY_SECONDS[0]
        except (OSError, ProtocolError, Refused):
            self._lost()
            return False
        finally:
            self._lock.release()
        return True

    def _connected(self, address: StoreAddress) -> StoreConnection | None:
        """The connection, opened if it is time to try; None without one."""
        if self._connection is None and time.monotonic() >= self._next:
            self._connection = StoreConnection(address, timeout=_ANSWER_SECONDS)
            # A name server that does not answer later would stop the heartbeat.
            self._address = replace(address, host=self._connection.peer)
        return self._connection

    def _lost(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection, self._next = None, time.monotonic() + self._pause
        self._pause = min(2 * self._pause, _RETRY_SECONDS[1])


def write_in_place(path: Path, data: bytes) -> None:
    """Replaces the contents of a file without replacing the file."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        os.write(descriptor, data)
        os.ftruncate(descriptor, len(data))
    finally:
        with contextlib.suppress(OSError):
            os.close(descriptor)
