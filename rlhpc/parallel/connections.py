"""TCP connections of this process's gloo groups, as the kernel shows them, and what may arrive on them.

Gloo has no interface to its sockets, so they are found by comparing the process's sockets before and after. Filters of
the kernel (classic BPF, socket(7) SO_ATTACH_FILTER) need no privilege.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import socket
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

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
    """Whether a socket is, or may have in its queue, a connection from before ``accept_silently``."""
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
