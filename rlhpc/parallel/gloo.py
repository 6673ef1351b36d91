"""Gloo groups that only ranks of this job can be in.

Gloo trusts whoever connects to a rank's port and sends a rank's number. So before a group is used, each rank looks its
accepted connections up in the job's store, which requires the job's secret: there the ranks publish both ends of each
connection that they open. If another program has taken the place of a rank, all ranks make the group again, and then
drop the data of each connection until a rank has published it. At the end the ports are closed to all.

What remains: programs that can change packets between the nodes, and floods of connections, which end the attempt.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import secrets
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from rlhpc.core import env
from rlhpc.core.errors import StrangerError
from rlhpc.core.shown import show
from rlhpc.parallel.connections import (
    Endpoint,
    Socket,
    accept_silently,
    close_to_all,
    hear,
    open_inodes,
    sends_data,
    sockets_except,
)
from rlhpc.parallel.meeting import Meeting, Sighting, compare
from rlhpc.parallel.store import JobStore

_Gloo: Any = torch._C._distributed_c10d.ProcessGroupGloo
_ATTEMPTS = 4  # the first without filters, which cost about 0.2 s
_SLOW_SECONDS = 60.0  # an attempt that took longer is not repeated
_OPENINGS = 100  # of listening sockets, until nobody connects before their filters exist
_CONNECT_SECONDS = 5.0
_POLL_SECONDS = 0.005
_RANK = struct.Struct("=q")


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
    """What this rank finds after all have connected to each other, or failed to."""
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
