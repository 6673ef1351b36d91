"""The job's key-value store, by which ranks find each other: a thread in the launcher's process, without torch.

It replaces torch's TCPStore, which lets anyone who can connect read and overwrite every key. ``core/store_protocol``
has the protocol and its guarantees.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import random
import resource
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Sequence

from rlhpc.core import env
from rlhpc.core import store_protocol as protocol
from rlhpc.core.rank import node_name
from rlhpc.core.shown import show

# Below Linux's ephemeral ports (32768 on), from which an outgoing connection could take the port before we do.
PORTS = range(20000, 30000)
HANDSHAKE_SECONDS = 5.0
_MOST_STRANGERS = 2048  # unauthenticated connections; the oldest is dropped for the next
_ACCEPTED_AT_ONCE = 16  # connections; established ones are served before the next
_PAUSE_SECONDS = 0.1  # without new connections, if no descriptor is free
_READ_SECONDS = 10.0  # for the server's thread to answer
_LOGGED_STRANGERS = 5  # lines about them on stderr


class StoreServer:
    """Listens on ``port`` of every interface from construction to ``close``, in a daemon thread."""

    def __init__(self, listener: socket.socket, secret: bytes) -> None:
        self.secret, self.port = secret, int(listener.getsockname()[1])
        self.beats = ReceivedBeats()
        self._listener, self._values = listener, StoreValues(self.beats)
        self._connections: set[_Connection] = set()
        self._strangers: dict[_Connection, None] = {}  # by age
        self._most_strangers = min(_MOST_STRANGERS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)
        self._opening: set[asyncio.Task[object]] = set()
        self._logged = 0
        self._loop = asyncio.new_event_loop()
        self._end = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="job-store", daemon=True)
        self._thread.start()

    @classmethod
    def open(cls, preferred_port: int | None = None, secret: bytes | None = None, host: str = "") -> StoreServer:
        """Listens on ``preferred_port``, or on a free one, with a line on stderr, if that is taken.

        ``host``: interface to listen on; empty: all. Raises the limit on open files of this process and of those it
        starts: each rank keeps a connection or two.
        """
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != hard:  # often 1,024
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        if preferred_port is not None:
            try:
                return cls(_listen(host, preferred_port), secret or protocol.new_secret())
            except OSError as error:
                cause = error.strerror or error
        for port in random.sample(PORTS, 200):
            try:
                listener = _listen(host, port)
            except OSError:
                continue
            if preferred_port is not None:
                node = node_name()
                show(f"rlhpc: port {preferred_port} on {node}: {cause}; port {port} is used instead", file=sys.stderr)
            return cls(listener, secret or protocol.new_secret())
        raise RuntimeError(f"no free port among 200 of {PORTS}")

    def environment(self, host: str) -> dict[str, str]:
        """Environment variables by which ranks find the store on ``host``. They contain the secret."""
        return {env.RLHPC_STORE: f"{host}:{self.port}", env.RLHPC_STORE_SECRET: self.secret.hex()}

    def read(self, key: str) -> bytes | None:
        """A value, None if it is not there. From another thread than the server's."""
        found: concurrent.futures.Future[bytes | None] = concurrent.futures.Future()
        self._loop.call_soon_threadsafe(lambda: found.set_result(self._values.value(key.encode())))
        return found.result(_READ_SECONDS)

    def write(self, key: str, value: str) -> None:
        """Sets or replaces a value. From another thread than the server's."""
        done: concurrent.futures.Future[object] = concurrent.futures.Future()
        request = [key.encode(), value.encode()]
        self._loop.call_soon_threadsafe(lambda: done.set_result(self._values.answer(protocol.Op.SET, request)))
        done.result(_READ_SECONDS)

    def close(self) -> None:
        """Stops listening and ends every connection."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._end.set)
            self._thread.join(timeout=5)

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        self._loop.add_reader(self._listener, self._accept)
        await self._end.wait()
        self._loop.remove_reader(self._listener)
        self._listener.close()
        await asyncio.gather(*self._opening, return_exceptions=True)
        for connection in list(self._connections):
            connection.drop()
        await asyncio.sleep(0)  # the sockets are closed by callbacks

    def _accept(self) -> None:
        """Accepts a few connections: asyncio's own server takes a whole backlog before it serves anyone."""
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                sock, _address = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError:
                self._loop.remove_reader(self._listener)
                self._loop.call_later(_PAUSE_SECONDS, self._accept_again)
                return
            sock.settimeout(0)
            if _has_left(sock):
                sock.close()
            else:
                self._open(sock)

    def _accept_again(self) -> None:
        if not self._end.is_set():
            self._loop.add_reader(self._listener, self._accept)

    def _open(self, sock: socket.socket) -> None:
        connection = _Connection(self)
        self._connections.add(connection)
        self._strangers[connection] = None
        if len(self._strangers) > self._most_strangers:
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            oldest.drop()
        task = self._loop.create_task(self._loop.connect_accepted_socket(lambda: connection, sock))
        self._opening.add(task)
        task.add_done_callback(lambda done: self._opened(connection, done))

    def _opened(self, connection: _Connection, done: asyncio.Task[object]) -> None:
        self._opening.discard(done)
        if done.cancelled() or done.exception() is not None:  # no transport will report its end
            self._left(connection)

    # Called by connections, in the server's thread.

    def _proved(self, connection: _Connection) -> None:
        self._strangers.pop(connection, None)

    def _left(self, connection: _Connection) -> None:
        self._connections.discard(connection)
        self._strangers.pop(connection, None)

    def _log(self, peer: str, what: str) -> None:
        self._logged += 1
        if self._logged <= _LOGGED_STRANGERS:
            more = "; further ones are not reported" if self._logged == _LOGGED_STRANGERS else ""
            show(f"rlhpc: the job's store: a connection from {peer} {what}{more}", file=sys.stderr)


def preferred_port(job_id: int) -> int:
    """Port that a job with this id tries first. It is predictable."""
    return PORTS[job_id % len(PORTS)]


def _listen(host: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(4096)
        listener.settimeout(0)  # non-blocking
    except OSError:
        listener.close()
        raise
    return listener


def _has_left(sock: socket.socket) -> bool:
    """True if the client has closed the connection already, as most of a flood have."""
    try:
        return not sock.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True


class _Connection(asyncio.Protocol):
    """Connection of one client: first its proof, then its requests."""

    def __init__(self, server: StoreServer) -> None:
        self._server, self._values = server, server._values
        self._nonce, self._proof, self._peer = protocol.nonce(), b"", "?"
        self._received: protocol.FrameBuffer | None = None  # None until the client has proved the secret
        self._transport: asyncio.Transport | None = None
        self._dropped = False
        self._wait: Wait | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._peer = str((transport.get_extra_info("peername") or ("?",))[0])
        self._patience = self._server._loop.call_later(HANDSHAKE_SECONDS, self._give_up)
        if self._dropped:
            transport.abort()
            return
        sock = transport.get_extra_info("socket")
        with contextlib.suppress(OSError):  # it has left already
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        transport.write(protocol.GREETING + self._nonce)

    def data_received(self, data: bytes) -> None:
        try:
            if self._received is None:
                data = self._prove(data)
            if self._received is not None:
                for payload in self._received.feed(data):
                    self._request(payload)
        except protocol.ProtocolError as error:
            self._server._log(self._peer, f"broke the protocol: {error}")
            self.drop()

    def connection_lost(self, error: Exception | None) -> None:
        self._patience.cancel()
        if self._wait is not None:
            self._values.forget(self._wait)
        self._server._left(self)

    def drop(self) -> None:
        """Ends the connection at once."""
        self._dropped = True
        if self._transport is not None:
            self._transport.abort()

    def _prove(self, data: bytes) -> bytes:
        """Takes the proof; returns the data after it, empty while the proof is incomplete or if it is wrong."""
        assert self._transport is not None
        missing = protocol.CLIENT_BYTES - len(self._proof)
        self._proof += data[:missing]
        if len(self._proof) < protocol.CLIENT_BYTES or self._transport.is_closing():
            return b""
        theirs, given = self._proof[: protocol.NONCE_BYTES], self._proof[protocol.NONCE_BYTES :]
        secret = self._server.secret
        if not protocol.proves(given, secret, b"client", self._nonce, theirs):
            self._server._log(self._peer, "was refused: wrong secret")
            self._transport.write(protocol.REFUSED)
            self._transport.close()
            return b""
        self._received = protocol.FrameBuffer(protocol.Direction(secret, b"client", self._nonce, theirs))
        self._sent = protocol.Direction(secret, b"server", self._nonce, theirs)
        self._patience.cancel()
        self._server._proved(self)
        self._transport.write(protocol.ACCEPTED + protocol.proof(secret, b"server", self._nonce, theirs))
        return data[missing:]

    def _give_up(self) -> None:
        self._server._log(self._peer, f"did not authenticate within {HANDSHAKE_SECONDS:g} s")
        self.drop()

    def _request(self, payload: bytes) -> None:
        if self._wait is not None:
            raise protocol.ProtocolError("a request before the last one was answered")
        code, fields = protocol.unpack(payload)
        if code in (protocol.Op.GET, protocol.Op.WAIT):
            if not fields:
                raise protocol.ProtocolError("fields are missing")
            self._wait_for(code, protocol.as_seconds(fields[0]), fields[1:])
            return
        self._answer(*self._values.answer(code, fields))

    def _wait_for(self, code: int, seconds: float, keys: list[bytes]) -> None:
        wait = Wait(keys, self._arrived, with_values=code == protocol.Op.GET)
        if self._values.advance(wait):
            return
        self._wait = wait
        wait.timer = self._server._loop.call_later(seconds, self._expired)

    def _arrived(self, values: Sequence[bytes]) -> None:
        self._wait = None
        self._answer(protocol.Status.DONE, values)

    def _expired(self) -> None:
        wait, self._wait = self._wait, None
        assert wait is not None
        self._values.forget(wait)
        self._answer(protocol.Status.TIMEOUT, self._values.missing(wait.keys))

    def _answer(self, status: protocol.Status, fields: Sequence[bytes]) -> None:
        assert self._transport is not None
        try:
            frame = protocol.pack(status, fields)
        except ValueError as error:  # values that are too large together
            frame = protocol.pack(protocol.Status.INVALID, [str(error).encode()])
        self._transport.write(self._sent.seal(frame))


class ReceivedBeats:
    """Newest record of each rank that the store has received. Its thread writes, the launcher's reads."""

    def __init__(self) -> None:
        self.request = b""  # the launcher's newest, which every answer has
        self._records: dict[int, tuple[bytes, float]] = {}

    def receive(self, rank: int, record: bytes) -> bytes:
        """Takes a record, empty if it is unchanged, and returns the newest request."""
        if record:
            self._records[rank] = record, time.monotonic()
        return self.request

    def record(self, rank: int) -> tuple[bytes, float] | None:
        """The rank's newest record, and the monotonic time of its arrival."""
        return self._records.get(rank)


class Wait:
    """A client that waits for ``keys``, one at a time: many keys cost no more memory."""

    def __init__(self, keys: Sequence[bytes], arrived: Callable[[Sequence[bytes]], None], *, with_values: bool) -> None:
        self.keys, self.with_values, self.arrived = keys, with_values, arrived
        self.next = 0
        self.timer: asyncio.TimerHandle | None = None


class StoreValues:
    """Keys, values, and waiting clients. Not thread-safe. ``beats``: heartbeats, which have no keys."""

    def __init__(self, beats: ReceivedBeats) -> None:
        self._beats = beats
        self._values: dict[bytes, bytes] = {}
        self._waiting: dict[bytes, dict[Wait, None]] = {}

    def value(self, key: bytes) -> bytes | None:
        """The value of a key, None if there is none."""
        return self._values.get(key)

    def missing(self, keys: Sequence[bytes]) -> list[bytes]:
        return [key for key in keys if key not in self._values]

    def advance(self, wait: Wait) -> bool:
        """Answers ``wait`` if all its keys exist, else keeps it until the next one is set."""
        values = self._values
        while wait.next < len(wait.keys):
            key = wait.keys[wait.next]
            if key not in values:
                self._waiting.setdefault(key, {})[wait] = None
                return False
            wait.next += 1
            if wait.next == len(wait.keys) and wait.with_values and self.missing(wait.keys):
                wait.next = 0  # a key was deleted meanwhile
        if wait.timer is not None:
            wait.timer.cancel()
        wait.arrived([values[key] for key in wait.keys] if wait.with_values else ())
        return True

    def forget(self, wait: Wait) -> None:
        """Removes ``wait``."""
        if wait.timer is not None:
            wait.timer.cancel()
        if wait.next < len(wait.keys):
            key = wait.keys[wait.next]
            self._waiting.get(key, {}).pop(wait, None)
            if not self._waiting.get(key, True):
                del self._waiting[key]

    def answer(self, code: int, fields: list[bytes]) -> tuple[protocol.Status, Sequence[bytes]]:
        """Executes a request that needs no waiting."""
        match code, fields:
            case protocol.Op.BEAT, [rank, record]:
                return protocol.Status.DONE, [self._beats.receive(protocol.as_number(rank), record)]
            case ((protocol.Op.SET | protocol.Op.APPEND), [key, value]):
                self._put(key, value, append=code == protocol.Op.APPEND)
            case protocol.Op.ADD, [key, amount]:
                return self._add(key, protocol.as_number(amount))
            case protocol.Op.CHECK, keys:
                return protocol.Status.DONE, [protocol.number(int(not self.missing(keys)))]
            case protocol.Op.COMPARE_SET, [key, expected, desired]:
                return protocol.Status.DONE, [self._compare_set(key, expected, desired)]
            case protocol.Op.DELETE, [key]:
                return protocol.Status.DONE, [protocol.number(self._values.pop(key, None) is not None)]
            case protocol.Op.NUM_KEYS, []:
                return protocol.Status.DONE, [protocol.number(len(self._values))]
            case ((protocol.Op.MULTI_SET | protocol.Op.MULTI_APPEND), pairs) if len(pairs) % 2 == 0:
                for key, value in zip(pairs[::2], pairs[1::2], strict=True):
                    self._put(key, value, append=code == protocol.Op.MULTI_APPEND)
            case _:
                raise protocol.ProtocolError(f"request {code} with {len(fields)} fields")
        return protocol.Status.DONE, ()

    def _put(self, key: bytes, value: bytes, *, append: bool = False) -> None:
        self._values[key] = self._values.get(key, b"") + value if append else value
        for wait in self._waiting.pop(key, ()):
            self.advance(wait)

    def _add(self, key: bytes, amount: int) -> tuple[protocol.Status, Sequence[bytes]]:
        try:
            total = int(self._values.get(key, b"0")) + amount
            answer = [protocol.number(total)]
        except (ValueError, struct.error):
            return protocol.Status.INVALID, [b"the value is not a 64-bit number"]
        self._put(key, str(total).encode())
        return protocol.Status.DONE, answer

    def _compare_set(self, key: bytes, expected: bytes, desired: bytes) -> bytes:
        """Value afterwards; ``expected`` if there is none but one was expected."""
        present = self._values.get(key)
        if present == expected or (present is None and not expected):
            self._put(key, desired)
            return desired
        return expected if present is None else present
