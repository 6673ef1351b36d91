"""Another user's program that tries to get into a run: it connects to every new port as soon as it is there, poses as a
rank, and speaks gloo: it answers what a rank waits for with a pickle that runs code, and takes what a rank sends.

``python stranger.py FILE [OPTION]...`` runs as nobody if it can, until its standard input ends, and then prints a
report: ports, connections, bytes of messages that it was sent. The pickle creates FILE. ``--net``: in a network of its
own, which its process id names; ``--idle``: does nothing; ``--skip=FIRST,LAST``: not to these ports.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import itertools
import json
import os
import pickle
import select
import socket
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

NOBODY = 65534
NETWORK = "RLHPC_TEST_NETWORK"  # environment variable: id of a process in whose network to start
CLONE_NEWNET = 0x40000000
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 1
_LISTENS = "0A"  # /proc/net/tcp
_HEAD = struct.Struct("=6Q")  # gloo/transport/tcp/pair.h: nbytes, opcode, slot, offset, length, roffset
_SEND, _WILL_SEND, _WANTS = 1, 2, 3  # opcodes
_RANKS = 8  # as which it poses
_MANNERS = ("speak", "close", "reset")
_MOST = 4000  # open connections


class Planted:
    """Creates a file when it is unpickled."""

    def __init__(self, file: str) -> None:
        self.file = file

    def __reduce__(self):
        return Path.touch, (Path(self.file),)


def private_network() -> None:
    """Moves this process to a network of its own, with a loopback interface."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "unshare")
    with socket.socket() as sock:
        fcntl.ioctl(sock, _SIOCSIFFLAGS, struct.pack("16sH22x", b"lo", _IFF_UP))


def enter_network(process: int) -> None:
    """Moves this thread to the network of a process."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/proc/{process}/ns/net") as network:
        if libc.setns(network.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")


class Connection:
    """One connection in which this program poses as a rank."""

    def __init__(self, sock: socket.socket, pickled: bytes) -> None:
        self.sock, self._pickled, self._data, self._due, self.read = sock, pickled, b"", 0, 0
        self._sent: dict[int, int] = {}

    def attend(self) -> bool:
        """Reads what there is; False at the end."""
        try:
            data = self.sock.recv(1 << 16)
        except BlockingIOError:
            return True
        except OSError:
            return False
        self._data += data
        while self._data:
            if self._due:
                taken = min(self._due, len(self._data))
                self._data, self._due, self.read = self._data[taken:], self._due - taken, self.read + taken
            elif len(self._data) < _HEAD.size:
                break
            else:
                head, self._data = self._data[: _HEAD.size], self._data[_HEAD.size :]
                self._answer(*_HEAD.unpack(head))
        return bool(data)

    def _answer(self, _bytes: int, opcode: int, slot: int, _offset: int, length: int, _roffset: int) -> None:
        if opcode == _WANTS and length < 1 << 20:
            content = struct.pack("=q", len(self._pickled)) if length <= 8 else self._pickled
            sent = self._sent.get(slot, 0)  # gloo may ask for a message in parts
            self._sent[slot] = sent + length
            content = content[sent : sent + length].ljust(length, b"\0")
            self.sock.sendall(_HEAD.pack(_HEAD.size + length, _SEND, slot, 0, length, 0) + content)
        elif opcode == _WILL_SEND:
            self.sock.sendall(_HEAD.pack(_HEAD.size, _WANTS, slot, 0, length, 0))
        elif opcode == _SEND:
            self._due = length


def listening() -> dict[str, tuple[int, str, int]]:
    """(family, host, port) of listening sockets by inode."""
    found = {}
    for path, family, groups in (("/proc/net/tcp", socket.AF_INET, 1), ("/proc/net/tcp6", socket.AF_INET6, 4)):
        with contextlib.suppress(OSError):
            for fields in map(str.split, Path(path).read_text().splitlines()[1:]):
                if fields[3] == _LISTENS:
                    host, port = fields[1].split(":")
                    words = [int(host[8 * i : 8 * i + 8], 16) for i in range(groups)]
                    text = socket.inet_ntop(family, struct.pack(f"={groups}I", *words))
                    found[fields[9]] = (family, text, int(port, 16))
    return found


class Stranger:
    def __init__(self, file: str) -> None:
        self._pickled = pickle.dumps(Planted(file))
        self._open: dict[int, Connection] = {}
        self._poll = select.poll()
        self.ports = self.connections = self.read = 0

    def attack(self, family: int, host: str, port: int, manners: Iterator[str]) -> None:
        """Connects to a port in place of each rank."""
        self.ports += 1
        for rank, manner in zip(range(_RANKS), manners, strict=False):
            sock = socket.socket(family)
            try:
                sock.settimeout(0)
                sock.connect_ex((host, port))  # on this machine it succeeds at once, or never
                sock.send(struct.pack("=q", rank))
            except OSError:
                sock.close()
                continue
            self.connections += 1
            if manner == "speak" and len(self._open) < _MOST:
                self._open[sock.fileno()] = Connection(sock, self._pickled)
                self._poll.register(sock, select.POLLIN)
                continue
            if manner == "reset":
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            sock.close()

    def attend(self) -> None:
        """Serves the connections that are open."""
        for number, _ in self._poll.poll(0):
            connection = self._open[number]
            with contextlib.suppress(OSError):
                if connection.attend():
                    continue
            self.read += connection.read
            self._poll.unregister(number)
            del self._open[number]
            connection.sock.close()

    def report(self) -> dict[str, int]:
        read = self.read + sum(connection.read for connection in self._open.values())
        return {"ports": self.ports, "connections": self.connections, "read": read}


def main(file: str, *options: str) -> None:
    if "--net" in options:
        private_network()
    if os.geteuid() == 0:
        with contextlib.suppress(OSError):  # ahead of the ranks
            os.setpriority(os.PRIO_PROCESS, 0, -20)
            os.setsid()
            Path("/proc/self/autogroup").write_text("-20")
        os.setgroups([])
        os.setresgid(*[NOBODY] * 3)
        os.setresuid(*[NOBODY] * 3)
    stranger, known = Stranger(file), set(listening())
    print(os.getpid(), flush=True)
    manners = itertools.cycle(_MANNERS)
    skipped = next((option.removeprefix("--skip=") for option in options if option.startswith("--skip=")), "0,0")
    first, last = map(int, skipped.split(","))
    while not select.select([sys.stdin], [], [], 0)[0]:
        for inode, place in listening().items():
            if inode not in known and "--idle" not in options:
                known.add(inode)
                if not first <= place[2] <= last:
                    stranger.attack(*place, manners)
        stranger.attend()
    print(json.dumps(stranger.report()), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
