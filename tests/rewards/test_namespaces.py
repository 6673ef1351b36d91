"""What a program in namespaces shares with others: files that it is shown, and counts of its user."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlhpc.rewards.sandbox import Limits, Sandbox
from tests.rewards.users import NOBODY

ROOMY = Limits(seconds=20, memory_mib=256)


@pytest.fixture
def shown() -> Iterator[Path]:
    """A folder of the programs' user, with a file, a socket and a FIFO."""
    with tempfile.TemporaryDirectory(prefix="shown-", dir="/tmp") as folder:
        path = Path(folder)
        (path / "below").mkdir()
        (path / "file").write_text("x")
        os.mkfifo(path / "below" / "fifo")
        for each in (path, *path.rglob("*")):
            if os.geteuid() == 0:
                os.chown(each, NOBODY, NOBODY)
        yield path


_SHARED = """
import fcntl, os, socket, sys
def attempt(what):
    try:
        what()
    except OSError as error:
        print(type(error).__name__)
    else:
        print("done")
os.chdir({folder!r})
file = os.open("file", os.O_RDONLY)
attempt(lambda: fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK))
attempt(lambda: fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_RDLCK))
attempt(lambda: socket.socket(socket.AF_UNIX).connect("below/socket"))
fifo = os.open("below/fifo", os.O_WRONLY | os.O_NONBLOCK)
os.write(fifo, b"forged")
print(open("file").read())
"""


def test_shown_files_can_be_read_and_nothing_else(shown):
    """No lease, which delays others that open the file; no socket or FIFO, which others read."""
    fifo = os.open(shown / "below" / "fifo", os.O_RDONLY | os.O_NONBLOCK)
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(shown / "below" / "socket"))
            os.chmod(shown / "below" / "socket", 0o777)
            server.listen()
            ended = Sandbox(ROOMY, paths=[str(shown)]).run(_SHARED.format(folder=str(shown)))
            assert ended.output.split() == ["PermissionError"] * 2 + ["ConnectionRefusedError", "x"], ended.errors
        assert os.read(fifo, 100) == b""
    finally:
        os.close(fifo)


_COUNTS = """
import ctypes, fcntl, os, platform, signal, socket
libc = ctypes.CDLL(None, use_errno=True)
arm = platform.machine() == "aarch64"
timers = 0
while timers < 1000 and libc.timer_create(1, None, ctypes.byref(ctypes.c_void_p())) == 0:
    timers += 1
print(timers <= 64, libc.syscall(26 if arm else 294, 0), libc.syscall(262 if arm else 300, 0, 0))
print(libc.syscall(0 if arm else 206, 9, ctypes.byref(ctypes.c_long())))
one, other = socket.socketpair()
for option in (socket.SO_SNDBUF, socket.SO_RCVBUF, 32, 33):
    try:
        one.setsockopt(socket.SOL_SOCKET, option, 1 << 24)
    except OSError as error:
        print(error.errno)
one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
try:
    fcntl.fcntl(os.pipe()[1], 1031, 1 << 20)
except OSError as error:
    print(error.errno)
signal.setitimer(signal.ITIMER_REAL, 100)
import asyncio
print(asyncio.run(asyncio.sleep(0, "ran")))
"""


def test_counts_of_the_user_and_memory_of_the_kernel_are_not_used_up():
    ended = Sandbox(ROOMY).run(_COUNTS)
    assert ended.output.split() == ["True", "-1", "-1", "-1", "1", "1", "1", "1", "1", "ran"], ended.errors


_SOCKETS = """
import os, socket
reading, writing = os.pipe()
first = os.getpid()
for _ in range(7):
    if not os.fork():
        break
kept, sent = [], 0
try:
    while True:
        kept.append(socket.socketpair())
        kept[-1][0].setblocking(False)
        try:
            kept[-1][0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 24)
        except PermissionError:
            pass
        while True:
            try:
                sent += kept[-1][0].send(bytes(1 << 16))
            except BlockingIOError:
                break
except OSError:
    os.write(writing, f"{sent} ".encode())
try:
    while True:
        os.wait()  # the others end with the first process
except ChildProcessError:
    if os.getpid() == first:
        print(os.read(reading, 4096).decode())
"""


def test_sockets_hold_little_memory_without_a_limit():
    """In eight processes with all of their files."""
    ended = Sandbox(ROOMY).run(_SOCKETS)
    held = [int(line) for line in ended.output.split()]
    assert len(held) == 8, ended.errors
    default = int(Path("/proc/sys/net/core/wmem_default").read_text())
    assert sum(held) < 1.5 * default * 8 * ROOMY.open_files / 2
