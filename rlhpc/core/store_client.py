"""Connection of a rank to its job's store, keys in the store, and the trainers' present start.

A connection connects, authenticates, and sends one request at a time. The launcher posts the start when it starts
trainers again; engines that outlive them read it. What trainers and engines post for each other is under a prefix of
that start, so that each begins with empty boards and connections of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field

from rlhpc.core import env
from rlhpc.core.errors import StoreError, UserError
from rlhpc.core.rank import node_name
from rlhpc.core.redaction import learn
from rlhpc.core.store_protocol import (
    ACCEPTED,
    CLIENT_BYTES,
    GREETING,
    GREETING_BYTES,
    MAC_BYTES,
    REFUSED,
    SECRET_BYTES,
    SERVER_BYTES,
    Direction,
    ProtocolError,
    nonce,
    pack,
    payload_size,
    proof,
    proves,
    unpack,
)

_GRACE_SECONDS = 20.0  # for an answer, beyond the wait of the request itself
_HANDSHAKE_SECONDS = 10.0
_RETRY_SECONDS = (0.05, 1.0)  # first and longest pause between attempts
_addresses: dict[str, StoreAddress] = {}  # the secret is removed from the environment when it is read

BOARD = "board"  # name of the board that all ranks have in common (rlhpc.parallel.board)
LOST_ENGINES = "lost_engines"  # on it: by engine, the generation that the trainers have given up last
BEGIN = "begin"  # on it: RL begins (rlhpc.trainer.handshake)
TRAINERS = "trainers"  # on no board: the trainers' present start, once they were started again (TrainersStart)


@dataclass(frozen=True)
class StoreAddress:
    host: str
    port: int
    secret: bytes

    def __repr__(self) -> str:
        return f"{self.host}:{self.port}"  # the secret stays out of logs and tracebacks

    @classmethod
    def parse(cls, text: str, secret: str) -> StoreAddress:
        """Address from the environment's ``host:port`` and hexadecimal secret."""
        host, _, port = text.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise UserError(f"{text!r} is not an address", where=env.RLHPC_STORE, remedy="write it as host:port")
        try:
            key = bytes.fromhex(secret)
        except ValueError:
            key = b""
        if len(key) != SECRET_BYTES:
            raise UserError(
                f"not {SECRET_BYTES} bytes in hexadecimal",
                where=env.RLHPC_STORE_SECRET,
                remedy="start the ranks with rlhpc, which creates one for each job",
            )
        learn({env.RLHPC_STORE_SECRET: secret})
        return cls(host, int(port), key)


def store_address(environ: MutableMapping[str, str] = os.environ) -> StoreAddress | None:
    """Address of the store that the launcher has named in the environment; None if it has named none.

    Removes the secret from ``environ``, so that child processes do not inherit it.
    """
    text = environ.get(env.RLHPC_STORE)
    if not text:
        return None
    if env.RLHPC_STORE_SECRET in environ or text not in _addresses:
        _addresses[text] = StoreAddress.parse(text, environ.pop(env.RLHPC_STORE_SECRET, ""))
    return _addresses[text]


class Refused(Exception):
    """The store rejects our secret, or the server there cannot prove that it is the store."""


class StoreConnection:
    """One authenticated connection; not thread-safe. Raises OSError or ProtocolError when it is lost."""

    def __init__(self, address: StoreAddress, timeout: float = _HANDSHAKE_SECONDS) -> None:
        self._socket = _connect(address.host, address.port, timeout)
        try:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            self._prove(address.secret)
        except BaseException:
            self.close()
            raise

    @property
    def peer(self) -> str:
        """IP address of the store."""
        return str(self._socket.getpeername()[0])

    def call(
        self, code: int, fields: Sequence[bytes] = (), wait_seconds: float = 0.0, grace_seconds: float = _GRACE_SECONDS
    ) -> tuple[int, list[bytes]]:
        """Answer to one request, which itself may take up to ``wait_seconds``."""
        self._socket.settimeout(wait_seconds + grace_seconds)
        self.send(pack(code, fields))
        return unpack(self.receive())

    def send(self, frame: bytes) -> None:
        """Sends a frame, with its MAC."""
        self._socket.sendall(self._sent.seal(frame))

    def receive(self) -> bytes:
        """Payload of the next frame."""
        head = self._receive(4)
        rest = self._receive(payload_size(head) + MAC_BYTES)
        payload = rest[:-MAC_BYTES]
        self._received.check(head + payload, rest[-MAC_BYTES:])
        return payload

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.close()

    def _prove(self, secret: bytes) -> None:
        greeting = self._receive(GREETING_BYTES)
        if not greeting.startswith(GREETING):
            raise ProtocolError("another program answers there")
        theirs, ours = greeting[len(GREETING) :], nonce()
        reply = ours + proof(secret, b"client", theirs, ours)
        assert len(reply) == CLIENT_BYTES
        self._socket.sendall(reply)
        answer = self._receive(1)
        if answer == REFUSED:
            raise Refused("it rejects our secret")
        if answer != ACCEPTED or not proves(self._receive(SERVER_BYTES - 1), secret, b"server", theirs, ours):
            raise Refused("the server there does not know the secret")
        self._sent, self._received = (Direction(secret, role, theirs, ours) for role in (b"client", b"server"))

    def _receive(self, size: int) -> bytes:
        data = bytearray(size)
        view, got = memoryview(data), 0
        while got < size:
            count = self._socket.recv_into(view[got:])
            if not count:
                raise ConnectionResetError("the job's store closed the connection")
            got += count
        return bytes(data)


def _connect(host: str, port: int, timeout: float) -> socket.socket:
    """Connects by IPv4, on which the server listens."""
    cause = OSError(f"no IPv4 address of {host}")
    for *_, place in socket.getaddrinfo(host, port, socket.AF_INET, socket.SOCK_STREAM):
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            sock.settimeout(timeout)
            sock.connect(place)
        except OSError as error:
            sock.close()
            cause = error
        else:
            return sock
    raise cause


def reach(address: StoreAddress, seconds: float) -> StoreConnection:
    """Connects, with retries for ``seconds``. Raises StoreError with the obstacle."""
    deadline = time.monotonic() + seconds
    pause, longest = _RETRY_SECONDS
    while True:
        left = deadline - time.monotonic()
        try:
            return StoreConnection(address, timeout=max(0.1, min(left, _HANDSHAKE_SECONDS)))
        except Refused as error:
            raise _unreachable(
                address, str(error), f"take {env.RLHPC_STORE} and {env.RLHPC_STORE_SECRET} from one job"
            ) from None
        except ProtocolError as error:
            raise _unreachable(address, str(error), "submit the job again; it will use another port") from None
        except socket.gaierror as error:
            cause = f"this node has no IPv4 address of the host name ({error.strerror})"
            remedy = "ask the administrators to make host names resolve on compute nodes, or set slurm.rendezvous_host"
        except OSError as error:
            cause = f"no connection within {seconds:g} s ({error.strerror or error})"
            remedy = (
                "check whether the job's first node still runs, whether this is its address, and for a firewall "
                "between the nodes"
            )
        if time.monotonic() + pause > deadline:
            raise _unreachable(address, cause, remedy) from None
        time.sleep(pause)
        pause = min(2 * pause, longest)


def _unreachable(address: StoreAddress, cause: str, remedy: str) -> StoreError:
    known = _resolved(address.host)
    place = f" ({known})" if known and known != address.host else ""
    return StoreError(f"the job's store at {address!r}{place}: {cause}", where=f"node {node_name()}", remedy=remedy)


def _resolved(host: str) -> str:
    """IPv4 address of a host on this node; empty without one."""
    try:
        return str(socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return ""


@dataclass(frozen=True)
class TrainersStart:
    """``generation``: how often the trainers were started before in this attempt; ``engines``: how often those engines
    were that were there then, which to these trainers begin with them."""

    generation: int = 0
    engines: Mapping[int, int] = field(default_factory=dict)

    @property
    def prefix(self) -> str:
        """Prefix of keys in the job's store; empty for the first start."""
        return f"{TRAINERS} {self.generation}" if self.generation else ""

    def key(self, name: str) -> str:
        """A key of this start."""
        return f"{self.prefix}/{name}" if self.prefix else name

    def generation_of(self, engine: int, generation: int) -> int:
        """Number of earlier starts of an engine that these trainers have seen, which was started ``generation`` times
        before in the attempt."""
        return generation - self.engines.get(engine, 0)

    def to_json(self) -> str:
        return json.dumps({"generation": self.generation, "engines": {str(one): n for one, n in self.engines.items()}})

    @classmethod
    def from_json(cls, text: str | bytes | None) -> TrainersStart:
        """The start that was posted; the first one if ``text`` is None."""
        if text is None:
            return cls()
        known = json.loads(text)
        return cls(int(known["generation"]), {int(engine): int(n) for engine, n in known["engines"].items()})
