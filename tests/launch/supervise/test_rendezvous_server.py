"""The job's store as the network sees it: members are served, strangers are not, and cannot disturb."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import selectors
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rlhpc.core.errors import StoreError, UserError
from rlhpc.core.store_client import StoreAddress, StoreConnection, reach
from rlhpc.core.store_protocol import (
    CLIENT_BYTES,
    GREETING,
    GREETING_BYTES,
    PROOF_BYTES,
    REFUSED,
    Op,
    Status,
    as_number,
    new_secret,
    nonce,
    number,
    pack,
    proof,
    seconds,
    unpack,
)
from rlhpc.launch.supervise import job_store
from rlhpc.launch.supervise.job_store import PORTS, StoreServer, preferred_port
from tests.helpers.waiting import PATIENCE, until


def address(server: StoreServer, secret: bytes | None = None) -> StoreAddress:
    return StoreAddress("127.0.0.1", server.port, secret or server.secret)


def raw(connection: StoreConnection) -> socket.socket:
    return connection._socket


def waits(server: StoreServer) -> bool:
    """True if the server has a request that waits for a key."""
    return bool(server._values._waiting)


@contextlib.contextmanager
def member(server: StoreServer) -> Iterator[StoreConnection]:
    connection = StoreConnection(address(server))
    yield connection
    connection.close()


def stranger(server: StoreServer) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE)
    assert len(receive(sock, GREETING_BYTES)) == GREETING_BYTES
    return sock


def receive(sock: socket.socket, size: int) -> bytes:
    """Up to ``size`` bytes; fewer when the connection ends."""
    data = b""
    with contextlib.suppress(ConnectionError):
        while len(data) < size and (more := sock.recv(size - len(data))):
            data += more
    return data


def key_count(server: StoreServer) -> int:
    with member(server) as connection:
        return as_number(connection.call(Op.NUM_KEYS)[1][0])


def test_a_member_sets_and_gets(server):
    with member(server) as one, member(server) as two:
        assert one.call(Op.SET, [b"key", b"value"]) == (Status.DONE, [])
        assert two.call(Op.GET, [seconds(1), b"key"]) == (Status.DONE, [b"value"])


def test_a_wrong_secret_is_reported_on_both_sides(server, capfd):
    with pytest.raises(UserError, match=r"store at 127\.0\.0\.1:\d+: it rejects our secret; take RLHPC_STORE"):
        reach(address(server, new_secret()), PATIENCE)
    wait_for_text(capfd, "a connection from 127.0.0.1 was refused: wrong secret")


def wait_for_text(capfd, text: str) -> str:
    seen = [""]

    def read() -> bool:
        seen[0] += capfd.readouterr().err
        return text in seen[0]

    until(read, repr(text), lambda: seen[0])
    return seen[0]


def test_requests_without_a_proof_do_nothing(server):
    request = pack(Op.SET, [b"key", b"theirs"])
    sock = stranger(server)
    sock.sendall(request * 4)  # more than a proof's bytes
    assert receive(sock, 100) in (REFUSED, b"")
    assert key_count(server) == 0


def test_requests_behind_a_wrong_proof_do_nothing(server):
    sock = stranger(server)
    sock.sendall(os.urandom(CLIENT_BYTES) + pack(Op.SET, [b"key", b"theirs"]))
    assert receive(sock, 100) in (REFUSED, b"")
    assert key_count(server) == 0


def test_a_recorded_handshake_does_not_open_a_second_connection(server):
    sock = socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE)
    challenge = receive(sock, GREETING_BYTES).removeprefix(GREETING)
    ours = nonce()
    recorded = ours + proof(server.secret, b"client", challenge, ours)
    sock.sendall(recorded)
    assert len(receive(sock, 1 + PROOF_BYTES)) == 1 + PROOF_BYTES
    again = stranger(server)
    again.sendall(recorded)
    assert receive(again, 100) == REFUSED


@pytest.mark.parametrize("answer", ["its own proof", "noise", "another program"])
def test_an_impostor_is_not_believed(answer):
    """Somebody took the port. The most it can do is send a client's own words back."""
    with socket.create_server(("127.0.0.1", 0)) as impostor:
        secret = new_secret()

        def serve() -> None:
            sock, _ = impostor.accept()
            with sock:
                if answer == "another program":
                    sock.sendall(b"220 mail.example.org ESMTP ready, say HELO or something\r\n")
                    return
                sock.sendall(GREETING + nonce())
                given = receive(sock, CLIENT_BYTES)[-PROOF_BYTES:]
                sock.sendall(b"\x01" + (given if answer == "its own proof" else os.urandom(PROOF_BYTES)))

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        expected = "another program answers" if answer == "another program" else "does not know the secret"
        with pytest.raises(UserError, match=expected):
            reach(StoreAddress("127.0.0.1", impostor.getsockname()[1], secret), PATIENCE)
        thread.join()


def test_noise_from_strangers_is_survived(server):
    source = random.Random(1)
    for _ in range(300):
        with contextlib.suppress(OSError), stranger(server) as sock:  # it may have hung up already
            sock.sendall(source.randbytes(source.choice([1, 7, 63, 64, 65, 1000, 100_000])))
            if source.random() < 0.5:
                sock.shutdown(socket.SHUT_WR)
                receive(sock, 100)
    assert key_count(server) == 0


def test_noise_from_members_ends_their_connection_only(server):
    source = random.Random(2)
    with member(server) as bystander:
        for _ in range(300):
            connection = StoreConnection(address(server))
            with contextlib.suppress(OSError):
                body = source.randbytes(source.randrange(1, 40))
                connection.send(len(body).to_bytes(4, "big") + body)
                raw(connection).shutdown(socket.SHUT_WR)
                receive(raw(connection), 1000)
            connection.close()
        assert bystander.call(Op.SET, [b"key", b"value"])[0] == Status.DONE


def test_a_huge_frame_is_refused_by_its_head(server, capfd):
    connection = StoreConnection(address(server))
    raw(connection).sendall(b"\xff\xff\xff\xff")
    assert receive(raw(connection), 1) == b""
    wait_for_text(capfd, "broke the protocol: a frame of 4,294,967,295 bytes")


def test_a_second_request_during_a_wait_ends_the_connection(server):
    connection = StoreConnection(address(server))
    connection.send(pack(Op.GET, [seconds(60), b"never"]))
    connection.send(pack(Op.NUM_KEYS))
    assert receive(raw(connection), 1) == b""


@pytest.mark.workers
def test_the_slow_slow_nobody_down(server, monkeypatch):
    """Connections that say nothing, or a byte now and then; members are answered while these are still there."""
    monkeypatch.setattr(job_store, "HANDSHAKE_SECONDS", 2 * PATIENCE)
    idle = [stranger(server) for _ in range(500)]
    dripping = stranger(server)
    with member(server) as connection:
        for _ in range(20):
            dripping.send(b"x")
            assert connection.call(Op.SET, [b"key", b"value"])[0] == Status.DONE
    with selectors.DefaultSelector() as selector:
        for sock in (*idle, dripping):
            selector.register(sock, selectors.EVENT_READ)
        assert selector.select(0) == [], "none was dropped"


@pytest.mark.workers
def test_the_slow_are_dropped(server, capfd, monkeypatch):
    """Those that drip too: a byte gives them no more time."""
    monkeypatch.setattr(job_store, "HANDSHAKE_SECONDS", 2.0)
    began, sent = time.monotonic(), 0
    idle = [stranger(server) for _ in range(20)]
    dripping = stranger(server)
    with contextlib.suppress(ConnectionError):
        while sent < CLIENT_BYTES:
            sent += dripping.send(b"x")
            time.sleep(0.1)
    assert sent < CLIENT_BYTES, "it was dropped, not refused"
    assert time.monotonic() - began > 1.9
    for sock in idle:
        assert receive(sock, 1) == b"", "it was dropped"
    assert wait_for_text(capfd, "further ones are not reported").count("did not authenticate within 2 s") == 5


def test_more_strangers_than_there_is_room_for_make_room(monkeypatch):
    monkeypatch.setattr(job_store, "_MOST_STRANGERS", 50)
    server = StoreServer.open(host="127.0.0.1")
    crowd = [stranger(server) for _ in range(120)]
    with member(server) as connection:
        assert connection.call(Op.NUM_KEYS)[0] == Status.DONE
        assert len(server._strangers) <= 50
    assert receive(crowd[0], 1) == b""
    server.close()


@pytest.mark.workers
def test_another_unix_user_connects_and_reads_nothing(server):
    if os.geteuid() != 0:
        pytest.skip("not root: no second user at hand")
    with member(server) as connection:
        connection.call(Op.SET, [b"key", b"value"])
        code = (
            "import os, socket, sys; assert os.geteuid() == 65534\n"
            f"from tests.launch.supervise.test_rendezvous_server import *\n"
            f"sock = socket.create_connection(('127.0.0.1', {server.port}), timeout=100)\n"
            "sock.recv(100); sock.sendall(pack(Op.GET, [seconds(1), b'key']) * 3)\n"
            "print('raw:', receive(sock, 1000) in (REFUSED, b''))\n"
            f"try: reach(StoreAddress('127.0.0.1', {server.port}, bytes(32)), 100)\n"
            "except UserError as error: print(error)\n"
        )
        command = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", sys.executable, "-c", code]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
        assert done.returncode == 0, done.stderr
        raw, refused = done.stdout.splitlines()
        assert raw == "raw: True"
        assert "it rejects our secret" in refused
        assert connection.call(Op.GET, [seconds(1), b"key"])[1] == [b"value"]


@pytest.mark.workers
def test_a_thousand_waiting_members_cost_nothing_until_the_key_comes(server):
    connections = [StoreConnection(address(server)) for _ in range(1000)]
    for connection in connections:
        connection.send(pack(Op.GET, [seconds(2 * PATIENCE), b"key"]))
        raw(connection).settimeout(PATIENCE)
    with member(server) as setter:
        setter.call(Op.NUM_KEYS)  # all requests before it were read
        used = time.process_time()
        time.sleep(1)
        assert time.process_time() - used < 0.05
        setter.call(Op.SET, [b"key", b"value"])
        for connection in connections:
            assert unpack(connection.receive()) == (Status.DONE, [b"value"])
    for connection in connections:
        connection.close()


def test_the_limit_on_open_files_is_raised():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(500, hard), hard))
    try:
        StoreServer.open(host="127.0.0.1").close()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_wait_that_expires_names_what_is_missing(server):
    with member(server) as connection:
        connection.call(Op.SET, [b"there", b"1"])
        began = time.monotonic()
        assert connection.call(Op.WAIT, [seconds(0.2), b"there", b"not"], PATIENCE) == (Status.TIMEOUT, [b"not"])
        assert 0.15 < time.monotonic() - began < 15
        assert connection.call(Op.CHECK, [b"there"]) == (Status.DONE, [number(1)])


def test_who_waits_and_leaves_is_forgotten(server):
    connection = StoreConnection(address(server))
    connection.send(pack(Op.GET, [seconds(60), b"never"]))
    with member(server) as other:
        until(lambda: waits(server), "the request")
        connection.close()
        until(lambda: not waits(server), "the server to forget it")
        assert other.call(Op.SET, [b"never", b"1"])[0] == Status.DONE


def test_a_key_deleted_while_others_are_awaited_is_awaited_again(server):
    with member(server) as waiting, member(server) as other:
        other.call(Op.SET, [b"a", b"1"])
        waiting.send(pack(Op.GET, [seconds(PATIENCE), b"a", b"b"]))
        until(lambda: waits(server), "the request")
        for request in ((Op.DELETE, [b"a"]), (Op.SET, [b"b", b"2"]), (Op.SET, [b"a", b"3"])):
            other.call(*request)
        assert waiting.receive() == b"\x01\0\0\0\x013\0\0\0\x012"


def test_many_members_at_once(server):
    def work(who: int) -> None:
        with member(server) as connection:
            for _ in range(50):
                connection.call(Op.ADD, [b"sum", number(who)])

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(work, range(16)))
    with member(server) as connection:
        assert connection.call(Op.GET, [seconds(1), b"sum"])[1] == [str(50 * sum(range(16))).encode()]


def test_the_preferred_port_comes_from_the_job_and_lies_below_the_ephemeral_ones():
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert preferred_port(1234567) == 24567
    assert max(PORTS) < first


def test_a_taken_port_is_reported_in_one_line_and_another_is_used(server, capfd):
    second = StoreServer.open(server.port, host="127.0.0.1")
    assert second.port != server.port
    message = capfd.readouterr().err.splitlines()
    assert len(message) == 1
    assert message[0].startswith(f"rlhpc: port {server.port} on ")
    assert message[0].endswith(f"Address already in use; port {second.port} is used instead")
    with member(second) as connection:
        assert connection.call(Op.NUM_KEYS)[0] == Status.DONE
    second.close()


def test_a_free_preferred_port_is_used_without_a_word(capfd):
    first = StoreServer.open()
    first.close()
    again = StoreServer.open(first.port)
    assert again.port == first.port
    assert capfd.readouterr().err == ""
    again.close()


def test_a_closed_server_ends_connections_and_answers_nobody(server):
    connection = StoreConnection(address(server))
    server.close()
    assert receive(raw(connection), 1) == b""
    began = time.monotonic()
    with pytest.raises(StoreError, match=r"no connection within 0\.5 s \(Connection refused\); check whether"):
        reach(address(server), 0.5)
    assert time.monotonic() - began < 10


def test_the_address_that_was_found_for_the_host_is_named(server):
    server.close()
    with pytest.raises(StoreError, match=rf"store at localhost:{server.port} \(127\.0\.0\.1\): no connection within"):
        reach(StoreAddress("localhost", server.port, server.secret), 0.2)


def test_an_unknown_host_is_named():
    with pytest.raises(
        UserError, match=r"the job's store at no-such-host\.invalid:20000: this node has no IPv4 address"
    ):
        reach(StoreAddress("no-such-host.invalid", 20000, new_secret()), 0.2)


@pytest.mark.heavy
def test_a_member_that_comes_before_the_server_waits_for_it():
    probe = StoreServer.open(host="127.0.0.1")
    probe.close()
    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(reach, StoreAddress("127.0.0.1", probe.port, probe.secret), PATIENCE)
        time.sleep(0.5)
        server = StoreServer.open(probe.port, probe.secret, host="127.0.0.1")
        assert coming.result(PATIENCE).call(Op.NUM_KEYS) == (Status.DONE, [number(0)])
    server.close()
