"""The job's own key-value store as a torch ``Store``, MACs under its secret, and the timeout of process groups.

Objects that ranks exchange have a MAC under the job's secret, checked before anything unpickles them. gloo and NCCL do
not authenticate connections: a program that connects to a rank as it starts can pose as another rank, and its pickle
would run code. A MAC does not name sender, receiver or time: an object of this job can be repeated by a program that
can read packets. Tensors have none.

Every process group of this process, and every meeting of ranks, has one timeout, set by ``groups.join``. In a run the
hang watch diagnoses a rank that does not come. A group that timed out before would blame the ranks that wait for it,
and a rank may wait for as long as another one makes progress, such as in a long rollout.
"""

from __future__ import annotations

import datetime
import hmac
import os
import threading
from collections.abc import Mapping, MutableMapping, Sequence
from hashlib import sha256

import torch.distributed as dist

from rlhpc.core.errors import StoreError
from rlhpc.core.store_client import StoreAddress, StoreConnection, reach, store_address
from rlhpc.core.store_protocol import Op, ProtocolError, Status, as_number, number, seconds

CONNECT_SECONDS = 60.0
_stores: list[JobStore] = []  # torch's C++ objects call a store until the process ends

_MAC_BYTES = 32
_ROOM_SECONDS = 86400.0  # a wait for ranks that make progress; the hang watch ends all others
_WITHOUT_WATCH_SECONDS = 1800.0  # torch's own default


def open_store(environ: MutableMapping[str, str] = os.environ) -> JobStore | None:
    """Store that the launcher has named in the environment; None if it has named none.

    Removes the secret from ``environ``, so that child processes do not inherit it.
    """
    address = store_address(environ)
    return None if address is None else JobStore(address)


class JobStore(dist.Store):
    """Client of the job's store server. Thread-safe: each call has a connection of its own.

    Raises StoreError if the server cannot be reached at first or rejects the secret, DistStoreError if keys are not set
    in time, DistNetworkError if the connection is lost.
    """

    # torch's C++ side calls getNumKeys and deleteKey; the other methods have the same names on both sides.

    def __init__(self, address: StoreAddress, connect_seconds: float = CONNECT_SECONDS) -> None:
        super().__init__()
        self._address, self._connect_seconds = address, connect_seconds
        self._lock, self._idle, self._pid = threading.Lock(), [reach(address, connect_seconds)], os.getpid()
        _stores.append(self)

    @property
    def secret(self) -> bytes:
        """The job's secret."""
        return self._address.secret

    def clone(self) -> JobStore:
        """This store: clones serve threads that must not wait for each other, and here none does."""
        return self

    def set(self, key: str, value: str | bytes) -> None:
        self._call(Op.SET, [key.encode(), _bytes(value)])

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def add(self, key: str, value: int) -> int:
        return as_number(self._call(Op.ADD, [key.encode(), number(value)])[0])

    def check(self, keys: Sequence[str]) -> bool:
        return bool(as_number(self._call(Op.CHECK, _encoded(keys))[0]))

    def wait(self, keys: Sequence[str], timeout: datetime.timedelta | None = None) -> None:
        self._wait(Op.WAIT, keys, self.timeout if timeout is None else timeout)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        return self._call(Op.COMPARE_SET, [key.encode(), _bytes(expected), _bytes(desired)])[0]

    def delete_key(self, key: str) -> bool:
        return bool(as_number(self._call(Op.DELETE, [key.encode()])[0]))

    deleteKey = delete_key

    def num_keys(self) -> int:
        return as_number(self._call(Op.NUM_KEYS)[0])

    getNumKeys = num_keys

    def append(self, key: str, value: str | bytes) -> None:
        self._call(Op.APPEND, [key.encode(), _bytes(value)])

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return self._wait(Op.GET, keys, self.timeout)

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        fields = [field for key, value in zip(keys, values, strict=True) for field in (key.encode(), _bytes(value))]
        self._call(Op.MULTI_SET, fields)

    def multi_append(self, values: Mapping[str, bytes]) -> None:
        """Appends to several keys at once; torch's stores have no such method."""
        self._call(Op.MULTI_APPEND, [field for key, value in values.items() for field in (key.encode(), value)])

    def has_extended_api(self) -> bool:
        """True if append, multi_get and multi_set exist."""
        return True

    def _wait(self, op: Op, keys: Sequence[str], timeout: datetime.timedelta) -> list[bytes]:
        limit = max(0.0, timeout.total_seconds())
        return self._call(op, [seconds(limit), *_encoded(keys)], limit)

    def _call(self, op: Op, fields: Sequence[bytes] = (), wait_seconds: float = 0.0) -> list[bytes]:
        connection = self._take()
        try:
            status, answer = connection.call(op, fields, wait_seconds)
        except (OSError, ProtocolError) as error:
            connection.close()
            raise dist.DistNetworkError(f"lost the job's store at {self._address!r}: {error}") from error
        except BaseException:
            connection.close()  # interrupted: the next request would receive this answer
            raise
        with self._lock:
            self._idle.append(connection)
        if status == Status.TIMEOUT:
            raise dist.DistStoreError(f"wait timeout after {wait_seconds:g} s in the job's store, {_names(answer)}")
        if status != Status.DONE:
            raise ValueError(f"the job's store: {b' '.join(answer).decode(errors='replace')}")
        return answer

    def _take(self) -> StoreConnection:
        """An idle connection; a forked process opens its own."""
        if self._pid != os.getpid():
            self._lock, self._idle, self._pid = threading.Lock(), [], os.getpid()
        with self._lock:
            if self._idle:
                return self._idle.pop()
        try:
            return reach(self._address, self._connect_seconds)
        except StoreError as error:  # the node has reached it before: not this node's fault alone
            raise dist.DistNetworkError(f"lost the job's store: {error}") from error


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def _encoded(keys: Sequence[str]) -> list[bytes]:
    return [key.encode() for key in keys]


def _names(keys: Sequence[bytes]) -> str:
    shown = ", ".join(key.decode(errors="replace") for key in keys[:5])
    return f"missing: {shown}" + (f" and {len(keys) - 5} more" if len(keys) > 5 else "")


_keys: list[bytes] = []  # of the job that this process has joined last


class ForgedObject(RuntimeError):
    """The received bytes are not an object of this job."""


def use_secret(secret: bytes) -> None:
    """Requires MACs under ``secret`` from here on."""
    _keys[:] = [hmac.digest(secret, b"rlhpc objects of ranks", sha256)]


def number_of(secret: bytes) -> int:
    """Number of 64 bits that only ranks of the job know."""
    return int.from_bytes(hmac.digest(secret, b"rlhpc connections of ranks", sha256)[:8], "big")


def seal(content: bytes) -> bytes:
    """``content`` with its MAC; ``content`` alone in a job without a secret."""
    return content + hmac.digest(_keys[0], content, sha256) if _keys else content


def opened(sealed: bytes) -> bytes:
    """Content of ``sealed``. Raises ForgedObject without a valid MAC."""
    if not _keys:
        return sealed
    content, mac = sealed[:-_MAC_BYTES], sealed[-_MAC_BYTES:]
    if not hmac.compare_digest(mac, hmac.digest(_keys[0], content, sha256)):
        raise ForgedObject(
            f"{len(sealed):,} bytes received as an object of another rank, but no rank of this job sent them"
        )
    return content


_timeout = [datetime.timedelta(seconds=_WITHOUT_WATCH_SECONDS)]


def beyond(*hang_seconds: float) -> float:
    """Timeout in seconds of ranks whose hang watch has these limits."""
    return max(hang_seconds) + _ROOM_SECONDS


def use_timeout(seconds: float) -> None:
    """Sets the timeout of all groups that this process makes from now on."""
    _timeout[:] = [datetime.timedelta(seconds=seconds)]


def group_timeout() -> datetime.timedelta:
    """Timeout of a group that is made now."""
    return _timeout[0]


def timeout_seconds() -> float:
    return group_timeout().total_seconds()
