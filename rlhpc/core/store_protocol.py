"""Protocol between the ranks of a job and its key-value store.

The store lets ranks find each other. Every user of the cluster can connect to it, so both sides first prove that they
know the job's secret, 32 random bytes that are never sent:

    server: GREETING, 32 random bytes
    client: 32 random bytes, HMAC-SHA256(secret, "client" + both)
    server: ACCEPTED, HMAC-SHA256(secret, "server" + both)          or REFUSED, and the end of the connection

A frame is its payload's length (4 bytes, big endian) and the payload: a byte with its code, and fields, each after its
length (4 bytes). A MAC of 32 bytes follows it: HMAC-SHA256 of the frame's number on this connection and the frame,
under a key of this connection and direction, derived from the secret and both random values. A client waits for the
answer to its request before it sends another.

Protected: without the secret, a client can neither read nor write a key, nor pose as the store, nor learn the secret
from a handshake. Whoever relays a connection cannot change, add, repeat, reorder or omit a frame: the next one ends the
connection. Not protected: frames are not encrypted, so anyone who can read packets on the job's network (root on a
node, a tapped switch) can read keys, and who can change them can end connections. With the secret, everything is
allowed. Both sides use IPv4 only: were the server on one family and the clients on both, another program could take the
same port of the other.
"""

from __future__ import annotations

import hmac
import secrets
import struct
from collections.abc import Iterable, Iterator
from enum import IntEnum
from hashlib import sha256

GREETING = b"rlhpc-store-2\n"
SECRET_BYTES = NONCE_BYTES = PROOF_BYTES = MAC_BYTES = 32
GREETING_BYTES = len(GREETING) + NONCE_BYTES
CLIENT_BYTES = NONCE_BYTES + PROOF_BYTES  # all that is read from an unauthenticated client
SERVER_BYTES = 1 + PROOF_BYTES
ACCEPTED, REFUSED = b"\x01", b"\x00"

MAX_FRAME_BYTES = 256 << 20  # after authentication; values are addresses, ids and small pickles
_LENGTH = struct.Struct("!I")
_NUMBER = struct.Struct("!q")
_SECONDS = struct.Struct("!d")


class Op(IntEnum):
    """Requests, with their fields."""

    SET = 1  # key, value
    GET = 2  # seconds, keys: waits until all exist
    ADD = 3  # key, number
    WAIT = 4  # seconds, keys
    CHECK = 5  # keys
    COMPARE_SET = 6  # key, expected, desired
    DELETE = 7  # key
    NUM_KEYS = 8
    APPEND = 9  # key, value
    MULTI_SET = 10  # key, value, key, value, ...
    MULTI_APPEND = 11  # key, value, key, value, ...
    BEAT = 12  # rank, record (empty: nothing new); the answer is the launcher's newest request (core/heartbeat.py)


class Status(IntEnum):
    """Answers, with their fields."""

    DONE = 1  # what the request asked for
    TIMEOUT = 2  # missing keys
    INVALID = 3  # reason: the request failed, the connection continues


class ProtocolError(Exception):
    """The other side does not speak this protocol."""


def new_secret() -> bytes:
    """A secret for one job."""
    return secrets.token_bytes(SECRET_BYTES)


def nonce() -> bytes:
    """Random bytes for one handshake."""
    return secrets.token_bytes(NONCE_BYTES)


def proof(secret: bytes, role: bytes, server_nonce: bytes, client_nonce: bytes) -> bytes:
    """Proof of knowing the secret; ``role`` keeps one side's proof from serving as the other's."""
    assert len(secret) == SECRET_BYTES, "the secret has another length"
    return hmac.digest(secret, role + GREETING + server_nonce + client_nonce, sha256)


def proves(given: bytes, secret: bytes, role: bytes, server_nonce: bytes, client_nonce: bytes) -> bool:
    """True if ``given`` is the proof, compared in constant time."""
    return hmac.compare_digest(given, proof(secret, role, server_nonce, client_nonce))


class Direction:
    """Computes the MACs of one direction of a connection: the frames that ``role`` sends, in order."""

    def __init__(self, secret: bytes, role: bytes, server_nonce: bytes, client_nonce: bytes) -> None:
        self._key = proof(secret, b"frames of the " + role, server_nonce, client_nonce)
        self._count = 0

    def seal(self, frame: bytes) -> bytes:
        """The next frame, with its MAC."""
        return frame + self._mac(frame)

    def check(self, frame: bytes | bytearray, mac: bytes) -> None:
        """Raises ProtocolError unless ``mac`` is that of ``frame`` as the next frame."""
        if not hmac.compare_digest(mac, self._mac(frame)):
            raise ProtocolError("a frame was changed, repeated or omitted on its way")

    def _mac(self, frame: bytes | bytearray) -> bytes:
        mac = hmac.new(self._key, _NUMBER.pack(self._count), sha256)
        mac.update(frame)
        self._count += 1
        return mac.digest()


def pack(code: int, fields: Iterable[bytes] = ()) -> bytes:
    """One frame, without its MAC."""
    parts = [bytes((code,))]
    for field in fields:
        parts += (_LENGTH.pack(len(field)), field)
    size = sum(map(len, parts))
    if size > MAX_FRAME_BYTES:
        raise ValueError(f"{size:,} bytes for the job's store, which takes {MAX_FRAME_BYTES:,} at once")
    return b"".join((_LENGTH.pack(size), *parts))


def unpack(payload: bytes) -> tuple[int, list[bytes]]:
    """Code and fields of one frame's payload."""
    if not payload:
        raise ProtocolError("an empty frame")
    fields, at = [], 1
    while at < len(payload):
        start = at + _LENGTH.size
        if start > len(payload):
            raise ProtocolError("a field is cut off")
        at = start + _LENGTH.unpack_from(payload, at)[0]
        if at > len(payload):
            raise ProtocolError("a field is longer than its frame")
        fields.append(payload[start:at])
    return payload[0], fields


def payload_size(head: bytes) -> int:
    """Size of a payload, from the first four bytes of its frame."""
    size: int = _LENGTH.unpack(head)[0]
    if not 0 < size <= MAX_FRAME_BYTES:
        raise ProtocolError(f"a frame of {size:,} bytes")
    return size


class FrameBuffer:
    """Splits received bytes into frames and checks their MACs."""

    def __init__(self, direction: Direction) -> None:
        self._data, self._direction = bytearray(), direction

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Payloads that ``data`` completes."""
        self._data += data
        while len(self._data) >= _LENGTH.size:
            end = _LENGTH.size + payload_size(bytes(self._data[: _LENGTH.size]))
            if len(self._data) < end + MAC_BYTES:
                return
            frame = bytes(self._data[:end])
            self._direction.check(frame, bytes(self._data[end : end + MAC_BYTES]))
            del self._data[: end + MAC_BYTES]
            yield frame[_LENGTH.size :]


def number(value: int) -> bytes:
    """A signed 64-bit number as a field."""
    return _NUMBER.pack(value)


def as_number(field: bytes) -> int:
    """The number in a field."""
    try:
        value: int = _NUMBER.unpack(field)[0]
    except struct.error:
        raise ProtocolError(f"a number of {len(field)} bytes") from None
    return value


def seconds(value: float) -> bytes:
    """A time in seconds as a field."""
    return _SECONDS.pack(value)


def as_seconds(field: bytes) -> float:
    """The time in seconds in a field: finite, not negative."""
    try:
        value: float = _SECONDS.unpack(field)[0]
    except struct.error:
        raise ProtocolError(f"a time of {len(field)} bytes") from None
    if not 0 <= value < 1e9:
        raise ProtocolError(f"a time of {value} s")
    return value
