"""Gloo groups that only ranks of this job can be in.

Gloo trusts any program that connects to a rank's port and sends a rank's number. So before a group is used, each rank
looks its accepted connections up in the job's store, which requires the job's secret: there the ranks publish both ends
of each connection that they open. If another program has taken the place of a rank, all ranks make the group again, and
then drop the data of each connection until a rank has published it. At the end the ports are closed to all.

Gloo has no interface to its sockets, so they are found by comparing the process's sockets before and after. Filters of
the kernel (classic BPF, socket(7) SO_ATTACH_FILTER) need no privilege. Two threats remain: programs that can change
packets between the nodes, and floods of connections, which end the attempt.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import fcntl
import json
import os
import secrets
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from rlhpc.core import env
from rlhpc.core.errors import StrangerError
from rlhpc.core.shown import show
from rlhpc.parallel.store import JobStore

_SHOWN = 3  # strangers in a message
_SO_ATTACH_FILTER = _SO_GET_FILTER = 26
_SO_DETACH_FILTER = 27
_WAITING = slice(24, 28)  # of struct tcp_info: tcpi_unacked, connections in the queue of a listening socket
_LOAD_LENGTH, _LOAD_BYTE, _STORE, _FETCH, _RIGHT, _LEFT, _TO_X = 0x80, 0x30, 0x02, 0x60, 0x74, 0x64, 0x07
_EQUALS_X, _RETURN = 0x1D, 0x06
_ALL = 0xFFFFFFFF
_DATA_OFFSET = 12  # byte of the TCP header: its length in words of 4 bytes, in the upper half
# Programs of (code, jump if true, jump if false, value) on a segment from its TCP header on.
_DROP_ALL = ((_RETURN, 0, 0, 0),)
_DROP_DATA = (
    (_LOAD_LENGTH, 0, 0, 0),
    (_STORE, 0, 0, 0),
    (_LOAD_BYTE, 0, 0, _DATA_OFFSET),
    (_RIGHT, 0, 0, 4),
    (_LEFT, 0, 0, 2),
    (_TO_X, 0, 0, 0),
    (_FETCH, 0, 0, 0),
    (_EQUALS_X, 0, 1, 0),
    (_RETURN, 0, 0, _ALL),
    (_RETURN, 0, 0, 0),
)

_Gloo: Any = torch._C._distributed_c10d.ProcessGroupGloo
_ATTEMPTS = 4  # the first without filters, which cost about 0.2 s
_SLOW_SECONDS = 60.0  # an attempt that took longer is not repeated
_OPENINGS = 100  # of listening sockets, until nobody connects before their filters exist
_CONNECT_SECONDS = 5.0
_POLL_SECONDS = 0.005
_RANK = struct.Struct("=q")


@dataclass(frozen=True)
class Sighting:
    """Observations of a rank's connections in one attempt. ``ports``: where it listens; ``strangers``: far ends of
    accepted connections that no rank opened; ``lost``: number of ranks without their place; ``taken``: number of
    strangers with one."""

    rank: int
    ports: tuple[str, ...]
    strangers: tuple[str, ...] = ()
    lost: int = 0
    taken: int = 0
    error: str = ""
    seconds: float = 0.0

    @property
    def whole(self) -> bool:
        return not (self.lost or self.taken or self.error)

    def describe(self) -> str:
        """The strangers, with addresses and ports."""
        count, where = len(self.strangers), ", ".join(self.ports)
        if not count:
            return f"a connection to {where} that no rank of this job opened took the place of a rank, and was closed"
        more = f" and {count - _SHOWN:,} more" if count > _SHOWN else ""
        ends = ", ".join(self.strangers[:_SHOWN]) + more
        met = f"{count:,} connection{'s' * (count > 1)} to {where} that no rank of this job opened, from {ends}"
        places = max(self.lost, self.taken)
        return met + (f"; places of ranks that were taken: {places}" if places else "")


def compare(
    rank: int, ports: Iterable[Endpoint], accepted: Mapping[Endpoint, bool], opened: Iterable[Endpoint]
) -> Sighting:
    """Compares accepted connections, far end: whether it has a rank's place, with those that ranks ``opened`` to us."""
    ours = set(opened)
    strangers = sorted(map(str, set(accepted) - ours))
    lost = sum(not accepted.get(end, False) for end in ours)
    taken = sum(place for end, place in accepted.items() if end not in ours)
    return Sighting(rank, tuple(sorted(map(str, ports))), tuple(strangers), lost, taken)


class Meeting:
    """One attempt of a group's ranks in the job's store, under a ``name`` that no other has."""

    def __init__(self, store: JobStore, name: str, rank: int, size: int) -> None:
        self._store, self._name, self.rank, self.size = store, name, rank, size

    def offer(self, ports: Collection[Endpoint]) -> None:
        """Shows all ranks where this one listens."""
        self._store.set(f"{self._name}/ports {self.rank}", _line([[port.host, port.port] for port in ports]))

    def other_ports(self) -> list[Endpoint]:
        """Endpoints at which the other ranks listen. Waits until they have all shown it."""
        names = [f"{self._name}/ports {rank}" for rank in range(self.size) if rank != self.rank]
        return [Endpoint(host, port) for ports in self._store.multi_get(names) for host, port in json.loads(ports)]

    def publish(self, opened: Iterable[tuple[Endpoint, Endpoint]]) -> None:
        """Shows listening ranks the connections (near end, far end) that this one has opened to them."""
        claims: dict[str, bytes] = {}
        for near, far in opened:
            claims[self._key(far)] = claims.get(self._key(far), b"") + _line([near.host, near.port])
        if claims:
            self._store.multi_append(claims)

    def opened_to(self, ports: Iterable[Endpoint]) -> set[Endpoint]:
        """Far ends of the connections that ranks have published for our ports so far."""
        keys = [key for key in map(self._key, ports) if self._store.check([key])]
        lines = [line for key in keys for line in self._store.get(key).splitlines()]
        return {Endpoint(host, port) for host, port in map(json.loads, lines)}

    def wait_for_all(self, what: str) -> None:
        """Waits until all ranks have called this."""
        key = f"{self._name}/{what}"
        if self._store.add(f"{key} count", 1) == self.size:
            self._store.set(key, b"all")
        self._store.wait([key])

    def report(self, seen: Sighting) -> None:
        """Shows all ranks what this one has seen."""
        self._store.append(f"{self._name}/sightings", _line(asdict(seen)))

    def sightings(self) -> list[Sighting]:
        """Reports of the ranks, in their order."""
        self._store.append(f"{self._name}/sightings", b"")
        found = [json.loads(line) for line in self._store.get(f"{self._name}/sightings").splitlines()]
        read = [
            Sighting(**{**one, "ports": tuple(one["ports"]), "strangers": tuple(one["strangers"])}) for one in found
        ]
        return sorted(read, key=lambda seen: seen.rank)

    def forget(self, ports: Iterable[Endpoint]) -> None:
        """Removes what was published for our ports."""
        for port in ports:
            self._store.delete_key(self._key(port))

    def _key(self, port: Endpoint) -> str:
        return f"{self._name}/to {port}"


def _line(value: object) -> bytes:
    return json.dumps(value).encode() + b"\n"


@dataclass(frozen=True)
class Endpoint:
    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


@dataclass(frozen=True)
class Socket:
    """A TCP socket of this process. ``remote``: None of one that listens; ``used``: whether a rank's messages go
    through it, if gloo accepted it."""

    descriptor: int
    inode: str
    local: Endpoint
    remote: Endpoint | None
    used: bool


def open_inodes() -> frozenset[str]:
    """Inodes of the sockets that this process has open."""
    return frozenset(inode for _, inode in _descriptors())


def sockets_except(known: frozenset[str]) -> list[Socket]:
    """TCP sockets of this process that listen or are connected, except those with ``known`` inodes."""
    found = []
    for descriptor, inode in _descriptors():
        if inode not in known:
            with contextlib.suppress(OSError), _opened(descriptor) as sock:
                if sock.type == socket.SOCK_STREAM and sock.family in (socket.AF_INET, socket.AF_INET6):
                    found.append(_described(descriptor, inode, sock))
    return found


def _described(descriptor: int, inode: str, sock: socket.socket) -> Socket:
    listens = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    remote = None if listens else _endpoint(sock.getpeername())  # an OSError before it is connected
    # gloo makes a connection non-blocking when it gives it to a rank (gloo/transport/tcp/pair.cc, connectCallback)
    used = bool(fcntl.fcntl(sock, fcntl.F_GETFL) & os.O_NONBLOCK)
    return Socket(descriptor, inode, _endpoint(sock.getsockname()), remote, used)


def close_to_all(listening: Socket) -> None:
    """Drops all that arrives at a listening socket from now on; its accepted connections continue. Raises OSError."""
    _filter(listening, _DROP_ALL)


def accept_silently(listening: Socket) -> None:
    """Lets a listening socket accept connections from now on, but drops their data. Raises OSError."""
    _filter(listening, _DROP_DATA)


def sends_data(sock: Socket) -> bool:
    """True if a socket is, or may have in its queue, a connection from before ``accept_silently``."""
    with contextlib.suppress(OSError), _same(sock) as opened:
        if sock.remote is not None:
            return opened.getsockopt(socket.SOL_SOCKET, _SO_GET_FILTER) == 0  # length of its filter
        info = opened.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _WAITING.stop)
        return any(info[_WAITING])
    return False


def hear(accepted: Socket) -> None:
    """Lets data pass on a connection that was accepted silently. TCP repeats what was dropped, after about 0.2 s."""
    with contextlib.suppress(OSError), _same(accepted) as sock:  # gloo may have closed it
        sock.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)


def _filter(target: Socket, steps: Sequence[tuple[int, int, int, int]]) -> None:
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    with _same(target) as sock:
        sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HL", len(steps), ctypes.addressof(code)))


def _descriptors() -> Iterator[tuple[int, str]]:
    """(descriptor, inode) of each open socket."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            inode = os.readlink(f"/proc/self/fd/{name}")
            if inode.startswith("socket:"):
                yield int(name), inode


@contextlib.contextmanager
def _opened(descriptor: int) -> Iterator[socket.socket]:
    with socket.socket(fileno=os.dup(descriptor)) as sock:
        yield sock


@contextlib.contextmanager
def _same(wanted: Socket) -> Iterator[socket.socket]:
    """The socket; raises OSError if its descriptor now has another one."""
    with _opened(wanted.descriptor) as sock:
        if os.readlink(f"/proc/self/fd/{sock.fileno()}") != wanted.inode:
            raise OSError(f"descriptor {wanted.descriptor} has been closed")
        yield sock


def _endpoint(address: Sequence[object]) -> Endpoint:
    return Endpoint(str(address[0]).partition("%")[0], int(str(address[1])))


def gloo_maker(job_store: JobStore) -> Callable[..., Any]:
    """A function that makes gloo groups, with the arguments of torch's class."""

    def make(store: dist.Store, rank: int, size: int, timeout: datetime.timedelta) -> Any:
        if size == 1:
            return _alone(store, timeout)
        name = _agreed_name(store, rank)
        for attempt in range(_ATTEMPTS):
            meeting = Meeting(job_store, f"{name}/{attempt}", rank, size)
            group, sightings = _attempt(meeting, dist.PrefixStore(f"{attempt}/", store), timeout, silent=attempt > 0)
            for sighting in sightings:
                if sighting.rank == rank and (sighting.strangers or sighting.lost):
                    show(f"rlhpc: {sighting.describe()}", file=sys.stderr)
            if all(sighting.whole for sighting in sightings):
                return group
            del group  # closes its connections
            if any(sighting.seconds > _SLOW_SECONDS for sighting in sightings):
                break
        raise _failure(sightings)

    return make


def _alone(store: dist.Store, timeout: datetime.timedelta) -> Any:
    """A group of this rank alone, to which nobody needs to connect."""
    opened = _open(timeout)
    group = _Gloo(store, 0, 1, opened.options)
    opened.close()
    return group


def _agreed_name(store: dist.Store, rank: int) -> str:
    """Name of this group in the job's store, which no other one has."""
    if rank == 0:
        store.set("name", secrets.token_hex(8))
    return f"gloo {store.get('name').decode()}"


@dataclass(frozen=True)
class _Opened:
    """Listening sockets of a group that is being made. ``known``: inodes of all older sockets of the process."""

    options: Any
    known: frozenset[str]
    ports: tuple[Socket, ...]

    @property
    def endpoints(self) -> set[Endpoint]:
        return {port.local for port in self.ports}

    def connections(self) -> tuple[dict[Endpoint, Socket], list[Socket]]:
        """The group's connections so far: accepted ones by far end, and opened ones."""
        found = [sock for sock in sockets_except(self.known) if sock.remote is not None]
        accepted = {sock.remote: sock for sock in found if sock.remote and sock.local in self.endpoints}
        return accepted, [sock for sock in found if sock.local not in self.endpoints]

    def close(self) -> None:
        """Ignores whoever connects from now on."""
        for port in self.ports:
            with contextlib.suppress(OSError):  # without filters: gloo accepts it, but has no place for it any more
                close_to_all(port)


def _open(timeout: datetime.timedelta) -> _Opened:
    """Listens on each interface that torch would use."""
    known = open_inodes()
    names = [name for name in os.environ.get(env.GLOO_SOCKET_IFNAME, "").split(",") if name]
    devices = [_Gloo.create_device(interface=name, lazy_init=False) for name in names]
    options = _Gloo._Options()
    options._devices = devices or [_Gloo.create_default_device(lazy_init=False)]
    options._timeout, options._threads = timeout, 2 * len(options._devices)
    return _Opened(options, known, tuple(sock for sock in sockets_except(known) if sock.remote is None))


def _open_silently(timeout: datetime.timedelta) -> _Opened:
    """Listens, and drops the data of all connections; none was accepted before that began."""
    for _ in range(_OPENINGS):
        opened = _open(timeout)
        for port in opened.ports:
            with contextlib.suppress(OSError):  # without filters a group with strangers is refused all the same
                accept_silently(port)
        if not any(sends_data(sock) for sock in sockets_except(opened.known)):
            break
    return opened


def _attempt(
    meeting: Meeting, store: dist.Store, timeout: datetime.timedelta, *, silent: bool
) -> tuple[Any, list[Sighting]]:
    """The group, None if it failed here, and what its ranks found. Collective."""
    started = time.monotonic()
    opened = _open_silently(timeout) if silent else _open(timeout)
    meeting.offer(opened.endpoints)
    group, error = None, ""
    with contextlib.ExitStack() as held:
        try:
            with _hearing(meeting, opened) if silent else contextlib.nullcontext():
                group = _Gloo(store, meeting.rank, meeting.size, opened.options)
        except RuntimeError as failure:
            error = str(failure)
            for port in meeting.other_ports():
                with contextlib.suppress(OSError):
                    held.enter_context(_connect_as(meeting.rank, port))
        found = replace(_look(meeting, opened), error=error, seconds=time.monotonic() - started)
        if found.strangers or not found.whole:
            meeting.report(found)
        meeting.wait_for_all("judged")
    meeting.forget(opened.endpoints)
    return group, meeting.sightings()


def _look(meeting: Meeting, opened: _Opened) -> Sighting:
    """Observations of this rank after all have connected to each other, or failed to."""
    _publish(meeting, opened.connections()[1])
    meeting.wait_for_all("published")
    opened.close()  # not before: if strangers have all places here, other ranks may still have to connect
    accepted = {end: sock.used for end, sock in opened.connections()[0].items()}
    return compare(meeting.rank, opened.endpoints, accepted, meeting.opened_to(opened.endpoints))


def _connect_as(rank: int, port: Endpoint) -> socket.socket:
    """A connection as gloo makes it, without which another rank would wait for ours until its timeout."""
    sock = socket.create_connection((port.host, port.port), _CONNECT_SECONDS)
    sock.sendall(_RANK.pack(rank))  # gloo/transport/tcp/device.cc, connectAsInitiator
    return sock


def _publish(meeting: Meeting, sockets: Sequence[Socket]) -> None:
    meeting.publish((sock.local, sock.remote) for sock in sockets if sock.remote is not None)


@contextlib.contextmanager
def _hearing(meeting: Meeting, opened: _Opened) -> Iterator[None]:
    """Publishes our connections, and hears those that ranks have published, while gloo waits for them."""
    ended = threading.Event()
    thread = threading.Thread(target=_hear_ranks, args=(meeting, opened, ended), name="gloo connections")
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _hear_ranks(meeting: Meeting, opened: _Opened, ended: threading.Event) -> None:
    done: set[str] = set()
    while not ended.wait(_POLL_SECONDS):
        accepted, ours = opened.connections()
        new = [sock for sock in ours if sock.inode not in done]
        _publish(meeting, new)
        waiting = {end: sock for end, sock in accepted.items() if sock.inode not in done}
        heard = [waiting[end] for end in meeting.opened_to(opened.endpoints) & waiting.keys()] if waiting else []
        for sock in heard:
            hear(sock)
        done.update(sock.inode for sock in (*new, *heard))


def _failure(sightings: Sequence[Sighting]) -> Exception:
    """The error after the last attempt, by its sightings."""
    met = [sighting for sighting in sightings if sighting.strangers or sighting.lost]
    if met:
        return StrangerError(
            f"{met[0].describe()}, in {_ATTEMPTS} attempts; find out who uses that address, or use other nodes; if"
            " nodes see each other through address translation, set slurm.verify_connections: false"
        )
    failed = next(sighting for sighting in sightings if sighting.error)
    return RuntimeError(f"gloo, rank {failed.rank} of the group: {failed.error}")
