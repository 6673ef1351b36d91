"""The job's store under attack: another user's program on the same port of another family, relays, a flood."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rlhpc.core.store_client import StoreAddress, StoreConnection, reach
from rlhpc.core.store_protocol import (
    CLIENT_BYTES,
    GREETING_BYTES,
    SERVER_BYTES,
    Op,
    ProtocolError,
    Status,
    number,
    seconds,
)
from rlhpc.launch.supervise.job_store import StoreServer
from tests.helpers.waiting import PATIENCE, until

REPOSITORY = Path(__file__).parents[3]


# ---- a name with both families

# Listens on [::1]:port as another user, prints a line for each connection, and answers none.
SQUATTER = """
import os, socket, sys
os.setgroups([]); os.setgid(65534); os.setuid(65534)
listener = socket.socket(socket.AF_INET6)
listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
listener.bind(("::1", int(sys.argv[1])))
listener.listen()
print("listening", flush=True)
while True:
    sock, _ = listener.accept()
    print("connection", flush=True)
    sock.close()
"""
# A rank on a node whose hosts file gives its name in both families.
MEMBER = """
import os, socket, sys
from rlhpc.core.store_client import StoreAddress, reach
from rlhpc.core.store_protocol import Op
assert {found[0] for found in socket.getaddrinfo("node7", 1)} == {socket.AF_INET, socket.AF_INET6}
address = StoreAddress.parse(f"node7:{sys.argv[1]}", os.environ["SECRET"])
print(reach(address, 20).call(Op.SET, [b"key", b"value"])[0])
"""
HOSTS = "127.0.0.1 localhost\n127.0.0.1 node7\n::1 node7\n"


def namespaces() -> bool:
    """Whether this machine lets a test change its hosts file for one process, and has IPv6."""
    if os.geteuid() != 0:
        return False
    script = "import socket; socket.socket(socket.AF_INET6).bind(('::1', 0))"
    mount = ["unshare", "--mount", "sh", "-c", f'mount --bind /etc/hosts /etc/hosts && exec "{sys.executable}" -c "$0"']
    with contextlib.suppress(OSError):
        return subprocess.run([*mount, script], capture_output=True, check=False).returncode == 0
    return False


@pytest.mark.workers
def test_members_ignore_a_listener_on_the_same_port_of_ipv6(server):
    if not namespaces():
        pytest.skip("not root, or no mount namespaces or IPv6 here")
    port = str(server.port)
    with (
        tempfile.NamedTemporaryFile("w") as hosts,
        subprocess.Popen([sys.executable, "-c", SQUATTER, port], stdout=subprocess.PIPE, text=True) as squatter,
    ):
        hosts.write(HOSTS)
        hosts.flush()
        try:
            assert squatter.stdout.readline() == "listening\n"
            script = f'mount --bind {hosts.name} /etc/hosts && exec "$0" "$@"'
            done = subprocess.run(
                ["unshare", "--mount", "sh", "-c", script, sys.executable, "-c", MEMBER, port],
                env={**os.environ, "SECRET": server.secret.hex()},
                cwd=REPOSITORY,
                capture_output=True,
                text=True,
                timeout=PATIENCE,
                check=False,
            )
        finally:
            squatter.kill()
        assert squatter.stdout.read() == "", "no member connects to it"
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(int(Status.DONE))]


# ---- a relay: whoever takes over packets between a member and the server

Change = Callable[[list[bytes]], list[bytes]]


class Relay:
    """Forwards one connection to the server; after the handshake, ``up`` and ``down`` change what they pass on.

    Each takes all messages of its direction so far and returns those to send for the newest.
    """

    def __init__(self, server: StoreServer, up: Change | None = None, down: Change | None = None) -> None:
        self._server, self._changes = server, (up, down)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = StoreAddress("127.0.0.1", self._listener.getsockname()[1], server.secret)
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        client, _ = self._listener.accept()
        with self._listener, client, socket.create_connection(("127.0.0.1", self._server.port)) as store:
            for source, target, size in (
                (store, client, GREETING_BYTES),
                (client, store, CLIENT_BYTES),
                (store, client, SERVER_BYTES),
            ):
                target.sendall(source.recv(size, socket.MSG_WAITALL))
            ways = {client: (store, self._changes[0], []), store: (client, self._changes[1], [])}
            with contextlib.suppress(OSError):
                while True:
                    for source in select.select(list(ways), [], [])[0]:
                        target, change, seen = ways[source]
                        if not (data := source.recv(1 << 16)):
                            return
                        seen.append(data)
                        for message in change(seen) if change else [data]:
                            target.sendall(message)


def other_value(seen: list[bytes]) -> list[bytes]:
    return [seen[-1].replace(b"ours", b"evil")]


def again(seen: list[bytes]) -> list[bytes]:
    return seen[-1:] * 2


def first_again(seen: list[bytes]) -> list[bytes]:
    return seen[:1]


def values(server: StoreServer) -> dict[bytes, bytes]:
    return dict(server._values._values)


def errors(capfd) -> str:
    """What the server has reported; waits for the first line."""
    seen: list[str] = []
    until(lambda: seen.append(capfd.readouterr().err) or any(seen), "a line of the server")
    return "".join(seen)


@pytest.mark.parametrize(
    ("change", "kept"),
    [(other_value, {}), (again, {b"sum": b"1"}), (first_again, {b"sum": b"1"})],
)
def test_a_relay_cannot_change_what_a_member_asks(server, capfd, change, kept):
    relay = Relay(server, up=change)
    member = StoreConnection(relay.address)
    with contextlib.suppress(OSError):
        for request in ((Op.ADD, [b"sum", number(1)]), (Op.ADD, [b"sum", number(2)]), (Op.SET, [b"key", b"ours"])):
            if change is other_value and request[0] != Op.SET:
                continue
            member.call(*request)
    member.close()
    assert "broke the protocol: a frame was changed, repeated or omitted" in errors(capfd)
    assert values(server) == kept


@pytest.mark.parametrize("change", [other_value, first_again])
def test_a_relay_cannot_change_what_a_member_is_answered(server, change):
    with contextlib.closing(reach(StoreAddress("127.0.0.1", server.port, server.secret), PATIENCE)) as other:
        other.call(Op.MULTI_SET, [b"a", b"first", b"b", b"ours"])
    member = StoreConnection(Relay(server, down=change).address)
    with pytest.raises(ProtocolError, match="changed, repeated or omitted"):
        [member.call(Op.GET, [seconds(1), key]) for key in (b"a", b"b")]
    member.close()


# ---- a flood of connections

FLOOD = """
import contextlib, os, socket, sys
os.setgroups([]); os.setgid(65534); os.setuid(65534)
print("begun", flush=True)
while True:
    socks = []
    for _ in range(500):
        sock = socket.socket()
        sock.setblocking(False)
        with contextlib.suppress(OSError):
            sock.connect(("127.0.0.1", int(sys.argv[1])))
        socks.append(sock)
    for sock in socks:
        sock.close()
"""


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def flooded(server: StoreServer, duration: float) -> tuple[list[float], list[float], int]:
    """Waits of an established member's requests, those of new members, and most open files in this process."""
    address, established, new, files = StoreAddress("127.0.0.1", server.port, server.secret), [], [], 0
    member = StoreConnection(address)
    with subprocess.Popen([sys.executable, "-c", FLOOD, str(server.port)], stdout=subprocess.PIPE) as flood:
        try:
            assert flood.stdout.readline() == b"begun\n"
            end = time.monotonic() + duration
            while (began := time.monotonic()) < end or not new:
                assert member.call(Op.ADD, [b"sum", number(1)])[0] == Status.DONE
                established.append(time.monotonic() - began)
                files = max(files, open_files())
                if len(established) % 20 == 0:
                    began = time.monotonic()
                    reach(address, 60).close()
                    new.append(time.monotonic() - began)
                time.sleep(0.01)
        finally:
            flood.kill()
    member.close()
    return established, new, files


@pytest.mark.workers
def test_a_flood_of_connections_delays_no_established_member(server):
    if os.geteuid() != 0:
        pytest.skip("not root: no second user at hand")
    files = open_files()
    established, new, most = flooded(server, 4.0)
    print(f"{len(established)} requests, longest {max(established):.3f} s; {len(new)} new members {new}; {most} files")
    # A busy machine may take the processor from both ends for a second or two: the flood itself lasts four.
    assert sorted(established)[len(established) * 99 // 100] < 0.5
    assert max(established) < 3.0
    assert new
    assert most - files < 2500
    until(lambda: open_files() < files + 20, "the strangers' connections to be closed")
